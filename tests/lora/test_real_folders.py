"""Folders as training leaves them: with a README, a tokenizer, checkpoints, and what macOS adds."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from caraserve.errors import PayloadTooLarge
from tests.lora.folders import write_adapter
from tests.lora.uploads import END, Receiver, entry, receiving, tar_of

OTHERS = ("README.md", "._adapter_config.json", ".DS_Store", "training_args.bin", "adapter_model.bin", "runs/events.1")
TEXTS = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "added_tokens.json")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with another adapter in a checkpoint below."""
    folder = write_adapter(tmp_path / "mine")
    write_adapter(folder / "checkpoint-500", {"lora_alpha": 1})
    (folder / "runs").mkdir()
    for name in OTHERS:
        (folder / name).write_text("x" * 700)
    (folder / "checkpoint-500" / ("long-" * 30)).write_text("")
    (folder / "latest").symlink_to("checkpoint-500")
    for name in TEXTS:
        (folder / name).write_text("{}")
    return folder


def tar_command(folder: Path, form: int, *names: str) -> bytes:
    """Returns what the command tar writes in a folder, whose members may come in any order."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for name in names:
            archive.add(folder / name, name)
    return target.getvalue()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
@pytest.mark.parametrize("way", ["folder", "inside", "glob"])
async def test_a_tar_of_a_folder_as_it_is_becomes_its_adapter(
    receiver: Receiver, made: Path, way: str, form: int
) -> None:
    digest = (await receiver.put("plain", tar_of(write_adapter(made.parent / "plain")))).info.digest
    names = {"folder": ["mine"], "inside": ["."], "glob": sorted(os.listdir(made))}[way]
    body = tar_command(made.parent if way == "folder" else made, form, *names)
    stored = await receiver.put("new", body)
    assert stored.info.digest == digest
    inside = "mine/" if way == "folder" else ""
    checkpoint = {f"checkpoint-500/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")}
    checkpoint.add(f"checkpoint-500/{'long-' * 30}"[: 100 - len(inside)])
    assert set(stored.skipped) == {inside + name for name in {*OTHERS, *checkpoint, "latest"}}
    kept = {"adapter_config.json", "adapter_model.safetensors", *TEXTS, ".caraserve-uploaded"}
    assert set(os.listdir(receiver.root / "new")) == kept


async def test_a_configuration_of_a_folder_below_that_comes_first_is_left_out(receiver: Receiver, made: Path) -> None:
    first = entry("checkpoint-5/adapter_config.json", b"{}") + entry("checkpoint-5/tokenizer.json", b"[]")
    stored = await receiver.put("new", first + tar_of(write_adapter(made.parent / "plain")))
    assert stored.skipped == ("checkpoint-5/adapter_config.json", "checkpoint-5/tokenizer.json")
    assert not (receiver.root / "new" / "tokenizer.json").exists()


async def test_of_many_files_that_were_skipped_some_are_named(receiver: Receiver, made: Path) -> None:
    others = b"".join(entry(f"other-{at}") for at in range(25))
    stored = await receiver.put("new", others + tar_of(write_adapter(made.parent / "plain")))
    assert stored.skipped == (*(f"other-{at}" for at in range(20)), "and 5 others")


async def test_files_beside_the_adapter_are_bounded(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.lora.upload_body.MOST_OTHER_BYTES", 1000)
    with pytest.raises(PayloadTooLarge, match="beside the adapter's"):
        await receiver.put("new", entry("a", bytes(600)) + entry("b", bytes(600)) + END)
    with pytest.raises(PayloadTooLarge, match="beside the adapter's"):
        await receiver.put("new", entry("tokenizer.json", bytes(1200)) + END)
    assert receiver.left() == []


async def test_a_folder_of_the_root_is_loaded_as_it_is(tmp_path: Path, made: Path) -> None:
    shutil.copytree(made, tmp_path / "root" / "mine", symlinks=True)
    async with receiving(tmp_path / "root") as receiver:
        assert (await receiver.catalog.load("mine", "mine", inplace=False)).rank == 4
