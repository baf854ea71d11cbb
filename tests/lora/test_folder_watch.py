"""Folders that come, change and go in --adapters-dir while the server runs."""

import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from caraserve.errors import ServerBusy
from caraserve.lora import folder_contents
from caraserve.lora.folder_contents import TENSORS_NAME, RefusedFolder, RefusedFolders
from caraserve.lora.folder_watch import FolderWatch
from caraserve.lora.peft_fields import CONFIG_NAME
from tests.cluster.nodes import until
from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver, aliases_of, receiving, tar_of


class Watched(Receiver):
    """A catalog whose root is watched."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(**vars(receiver))
        self.aliases = aliases_of(receiver)
        self.watch = FolderWatch(self.root, self.catalog, self.aliases)

    async def settle(self) -> None:
        """Lets the files look the same in two polls."""
        await self.watch.poll()
        await self.watch.poll()

    def names(self) -> list[str]:
        return [info.name for info in self.catalog.all()]


@pytest.fixture
@asynccontextmanager
async def receiver(tmp_path: Path) -> AsyncIterator[Watched]:
    async with receiving(tmp_path / "root") as made:
        yield (watched := Watched(made))
        await watched.watch._unloads.end()


async def test_a_folder_that_comes_changes_and_goes_is_followed(receiver: Watched) -> None:
    write_adapter(receiver.root / "new")
    await receiver.watch.poll()
    assert receiver.names() == []
    await receiver.watch.poll()
    first = receiver.catalog.get("new").digest
    write_adapter(receiver.root / "new", {"lora_alpha": 9})
    await receiver.settle()
    assert receiver.catalog.get("new").digest != first
    shutil.rmtree(receiver.root / "new")
    await receiver.settle()
    await until(lambda: receiver.names() == [])


async def test_a_folder_that_is_still_being_copied_waits(receiver: Watched) -> None:
    whole = (write_adapter(receiver.root / ".copy") / TENSORS_NAME).read_bytes()
    os.mkdir(receiver.root / "new")
    shutil.copy(receiver.root / ".copy" / CONFIG_NAME, receiver.root / "new")
    for size in (1000, 1500, len(whole)):
        await receiver.watch.poll()
        (receiver.root / "new" / TENSORS_NAME).write_bytes(whole[:size])
        assert receiver.names() == []
    await receiver.settle()
    assert receiver.names() == ["new"]


async def test_a_folder_that_cannot_be_served_is_logged_once_and_tried_again_when_it_changes(
    receiver: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    write_adapter(receiver.root / "bad", {"kasa_config": {"beta": 1}})
    write_adapter(receiver.root / "two words")
    for _ in range(3):
        await receiver.settle()
    assert sorted("kasa_config" in record.getMessage() for record in caplog.records) == [False, True]
    write_adapter(receiver.root / "bad")
    await receiver.settle()
    assert receiver.names() == ["bad"]


async def test_a_folder_that_could_not_be_checked_is_tried_again(
    receiver: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(receiver.root / "new", {"target_modules": r".*\.q_proj"})
    with monkeypatch.context() as context:
        context.setattr("caraserve.lora.peft_config.matched", no_process)
        await receiver.settle()
        assert [one.reason for one in receiver.catalog.refused.all()] == ["no process"]
    await receiver.watch.poll()
    assert receiver.names() == ["new"]
    assert receiver.catalog.refused.all() == []


def no_process(*arguments: object) -> None:
    raise ServerBusy("no process", retry_after_s=1.0)


async def test_what_others_have_loaded_or_unloaded_is_left_alone(receiver: Watched, folder: Path) -> None:
    write_adapter(receiver.root / "own")
    await receiver.settle()
    await receiver.catalog.unload("own")
    await receiver.settle()
    assert receiver.names() == []
    uploaded = await receiver.put("sent", tar_of(folder))
    await receiver.settle()
    assert receiver.catalog.get("sent") is uploaded.info
    await receiver.delete("sent")
    await receiver.settle()
    assert receiver.names() == []


@pytest.mark.parametrize("how", ["uploaded", "replaced", "dropped in"])
@pytest.mark.parametrize("polls", [0, 1, 2])
async def test_what_is_unloaded_at_any_time_stays_unloaded_until_its_files_change(
    receiver: Watched, folder: Path, tmp_path: Path, how: str, polls: int
) -> None:
    if how == "dropped in":
        write_adapter(receiver.root / "x")
        await receiver.catalog.load("x", "x", inplace=False)
    else:
        await receiver.put("x", tar_of(folder))
    if how == "replaced":
        await receiver.settle()
        await receiver.put("x", tar_of(write_adapter(tmp_path / "other", {"lora_alpha": 9})))
    for _ in range(polls):
        await receiver.watch.poll()
    await receiver.catalog.unload("x")
    for _ in range(3):
        await receiver.settle()
        assert receiver.names() == []
    refusal = receiver.catalog.refused.get("x")
    assert refusal is not None
    assert "it was unloaded or deleted over HTTP" in refusal.reason
    write_adapter(receiver.root / "x", {"lora_alpha": 10})
    await receiver.settle()
    assert receiver.names() == ["x"]
    assert receiver.catalog.refused.all() == []


async def test_a_folder_that_goes_while_its_name_is_uploaded_does_not_take_the_upload_with_it(
    receiver: Watched, tmp_path: Path
) -> None:
    write_adapter(receiver.root / "x")
    await receiver.settle()
    shutil.rmtree(receiver.root / "x")
    await receiver.watch.poll()
    unload, stored = receiver.catalog.unload, []

    async def upload_first(*arguments: Any) -> None:
        stored.append(await receiver.put("x", tar_of(write_adapter(tmp_path / "made", {"lora_alpha": 9}))))
        await unload(*arguments)

    receiver.catalog.unload = upload_first  # type: ignore[method-assign]
    await receiver.watch.poll()
    await until(lambda: not len(receiver.watch._unloads))
    assert receiver.catalog.get("x") is stored[0].info


async def test_an_upload_that_another_instance_has_replaced_does_not_come_back(receiver: Watched, folder: Path) -> None:
    await receiver.put("sent", tar_of(folder))
    receiver.catalog.adopt("sent", "f" * 64, 8, 1000)
    await receiver.settle()
    assert receiver.catalog.get("sent").digest == "f" * 64


async def test_a_folder_with_the_name_of_an_alias_is_left_out_and_logged_once(
    receiver: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    await receiver.aliases.point("prod", "sql-v7")
    write_adapter(receiver.root / "prod")
    for _ in range(2):
        await receiver.settle()
    assert receiver.names() == []
    (record,) = caplog.records
    assert "'prod' is an alias" in record.getMessage()


async def test_a_folder_is_served_once_the_alias_of_its_name_is_gone(receiver: Watched) -> None:
    write_adapter(receiver.root / "prod")
    for adapter in ("sql-v7", "sql-v8"):
        await receiver.aliases.point("prod", adapter)
        await receiver.settle()
        assert [one.name for one in receiver.catalog.refused.all()] == ["prod"]
        await receiver.aliases.remove_of(adapter)
        await receiver.aliases.point("prod", adapter)  # at once: the folder is still left out
        await receiver.watch.poll()
        assert receiver.names() == []
        await receiver.aliases.remove("prod")
    await receiver.watch.poll()
    assert receiver.names() == ["prod"]
    assert receiver.catalog.refused.all() == []


async def test_a_name_that_stands_for_another_folder_keeps_it(receiver: Watched) -> None:
    write_adapter(receiver.root / "nested" / "x")
    loaded = await receiver.catalog.load("x", "nested/x", inplace=False)
    write_adapter(receiver.root / "x", {"lora_alpha": 9})
    await receiver.settle()
    assert receiver.catalog.get("x") is loaded
    shutil.rmtree(receiver.root / "x")
    await receiver.settle()
    assert receiver.names() == ["x"]
    assert json.loads((receiver.root / "nested" / "x" / CONFIG_NAME).read_text())["lora_alpha"] == 8


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: folder.mkdir(), "the folder is empty"),
    "pickle": (
        lambda folder: (write_adapter(folder) / TENSORS_NAME).rename(folder / "adapter_model.pt"),
        "the folder holds a pickle, adapter_model.pt; only adapter_model.safetensors and adapter_model.bin are read",
    ),
    "nested": (
        lambda folder: [write_adapter(folder / f"checkpoint-{step}") for step in (500, 1000)],
        "but 'checkpoint-1000', 'checkpoint-500'; only folders directly in --adapters-dir are loaded",
    ),
    "deep": (lambda folder: write_adapter(folder / "name" / "checkpoint-5"), "but 'name/checkpoint-5'; only folders"),
    "half": (lambda folder: (write_adapter(folder) / CONFIG_NAME).unlink(), "the folder has no adapter_config.json"),
    "foreign": (
        lambda folder: (write_adapter(folder) / CONFIG_NAME).rename(folder / "x.onnx") and
        (folder / TENSORS_NAME).rename(folder / "y.safetensors"),
        "no adapter_model.safetensors, but 'x.onnx', 'y.safetensors'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
async def test_a_folder_without_an_adapter_is_named_with_what_it_holds_once(
    receiver: Watched, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    make, reason = OTHERS[kind]
    make(receiver.root / "x")
    await receiver.watch.poll()
    assert logged(caplog) == [], "it may be half copied"
    for _ in range(2):
        await receiver.settle()
    (message,) = logged(caplog)
    assert message.startswith(f"{str(receiver.root / 'x')!r} in --adapters-dir is left out: ")
    assert reason in message
    (refusal,) = receiver.catalog.refused.all()
    assert (refusal.name, refusal.reason in message) == ("x", True)
    shutil.rmtree(receiver.root / "x")
    await receiver.watch.poll()
    assert receiver.catalog.refused.all() == []


async def test_a_folder_that_gets_its_files_late_is_no_longer_refused(receiver: Watched) -> None:
    (receiver.root / "x").mkdir()
    await receiver.settle()
    assert [refusal.reason for refusal in receiver.catalog.refused.all()] == ["the folder is empty"]
    write_adapter(receiver.root / "x")
    await receiver.settle()
    assert (receiver.names(), receiver.catalog.refused.all()) == (["x"], [])


async def test_hidden_folders_files_and_those_of_file_systems_are_passed_over(receiver: Watched) -> None:
    for name in (".cache", "lost+found"):
        (receiver.root / name).mkdir()
    (receiver.root / "README.md").touch()
    await receiver.settle()
    assert receiver.catalog.refused.all() == []


def test_refusals_are_bounded_and_name_no_path_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_contents, "_MOST_REFUSED", 2)
    refused = RefusedFolders([Path("/srv/adapters")], now=lambda: 7.0)
    assert refused.note("a", "a link that leads outside /srv/adapters")
    assert not refused.note("a", "a link that leads outside /srv/adapters")
    assert refused.note("b", "x" * 10_000)
    assert refused.note("a", "it is empty")
    assert refused.note("c", "it is empty")
    assert [(one.name, len(one.reason), one.since_s) for one in refused.all()] == [("a", 11, 7.0), ("c", 11, 7.0)]
    refused.note("d", "outside /srv/adapters")
    assert refused.get("d") == RefusedFolder("d", "outside --adapters-dir", 7.0)


@pytest.mark.parametrize(
    ("roots", "reason", "shown"),
    [
        (["/"], "and/or '/srv/x'", "and/or '/srv/x'"),
        ([], "'/srv/x'", "'/srv/x'"),
        (
            ["/srv"],
            "'/srv/x', '/srv2/x', '/mnt/srv/x', '/srv'",
            "'--adapters-dir/x', '/srv2/x', '/mnt/srv/x', '--adapters-dir'",
        ),
        (["/srv", "/srv/a"], "/srv/a/x or /srv/b.", "--adapters-dir/x or --adapters-dir/b."),
    ],
)
def test_a_reason_is_changed_only_where_it_has_a_folder_of_the_server(
    roots: list[str], reason: str, shown: str
) -> None:
    refused = RefusedFolders([Path(root) for root in roots], now=lambda: 7.0)
    refused.note("x", reason)
    assert refused.get("x") == RefusedFolder("x", shown, 7.0)
