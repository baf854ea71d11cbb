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
from caraserve.lora.folder_contents import RefusedFolder, RefusedFolders
from caraserve.lora.folder_watch import FolderWatch
from caraserve.lora.peft import TENSORS_NAME
from caraserve.lora.peft_config import CONFIG_NAME
from tests.cluster.nodes import until
from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver, aliases_of, receiving, tar_of


@asynccontextmanager
async def watched(root: Path) -> AsyncIterator[tuple[Receiver, FolderWatch]]:
    async with receiving(root) as receiver:
        watch = FolderWatch(root, receiver.catalog, aliases_of(receiver))
        yield receiver, watch
        await watch._unloads.end()


async def settle(watch: FolderWatch) -> None:
    """Lets the files look the same in two polls."""
    await watch.poll()
    await watch.poll()


def names(receiver: Receiver) -> list[str]:
    return [info.name for info in receiver.catalog.all()]


async def test_a_folder_that_comes_changes_and_goes_is_followed(tmp_path: Path) -> None:
    async with watched(tmp_path) as (receiver, watch):
        write_adapter(tmp_path / "new")
        await watch.poll()
        assert names(receiver) == []
        await watch.poll()
        first = receiver.catalog.get("new").digest
        write_adapter(tmp_path / "new", {"lora_alpha": 9})
        await settle(watch)
        assert receiver.catalog.get("new").digest != first
        shutil.rmtree(tmp_path / "new")
        await settle(watch)
        await until(lambda: names(receiver) == [])


async def test_a_folder_that_is_still_being_copied_waits(tmp_path: Path) -> None:
    async with watched(tmp_path) as (receiver, watch):
        whole = (write_adapter(tmp_path / ".copy") / TENSORS_NAME).read_bytes()
        os.mkdir(tmp_path / "new")
        shutil.copy(tmp_path / ".copy" / CONFIG_NAME, tmp_path / "new")
        for size in (1000, 1500, len(whole)):
            await watch.poll()
            (tmp_path / "new" / TENSORS_NAME).write_bytes(whole[:size])
            assert names(receiver) == []
        await settle(watch)
        assert names(receiver) == ["new"]


async def test_a_folder_that_cannot_be_served_is_logged_once_and_tried_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    async with watched(tmp_path) as (receiver, watch):
        write_adapter(tmp_path / "bad", {"use_dora": True})
        write_adapter(tmp_path / "two words")
        for _ in range(3):
            await settle(watch)
        assert sorted("use_dora" in record.getMessage() for record in caplog.records) == [False, True]
        write_adapter(tmp_path / "bad")
        await settle(watch)
        assert names(receiver) == ["bad"]


async def test_a_folder_that_could_not_be_checked_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path) as (receiver, watch):
        write_adapter(tmp_path / "new", {"target_modules": r".*\.q_proj"})
        with monkeypatch.context() as context:
            context.setattr("caraserve.lora.peft_config.matched", no_process)
            await settle(watch)
            assert [one.reason for one in receiver.catalog.refused.all()] == ["no process"]
        await watch.poll()
        assert names(receiver) == ["new"]
        assert receiver.catalog.refused.all() == []


def no_process(*arguments: object) -> None:
    raise ServerBusy("no process", retry_after_s=1.0)


async def test_what_others_have_loaded_or_unloaded_is_left_alone(tmp_path: Path) -> None:
    async with watched(tmp_path / "root") as (receiver, watch):
        write_adapter(tmp_path / "root" / "own")
        await settle(watch)
        await receiver.catalog.unload("own")
        await settle(watch)
        assert names(receiver) == []
        body = tar_of(write_adapter(tmp_path / "made"))
        uploaded = await receiver.put("sent", body)
        await settle(watch)
        assert receiver.catalog.get("sent") is uploaded.info
        await receiver.delete("sent")
        await settle(watch)
        assert names(receiver) == []


@pytest.mark.parametrize("how", ["uploaded", "replaced", "dropped in"])
@pytest.mark.parametrize("polls", [0, 1, 2])
async def test_what_is_unloaded_at_any_time_stays_unloaded_until_its_files_change(
    tmp_path: Path, how: str, polls: int
) -> None:
    async with watched(tmp_path / "root") as (receiver, watch):
        if how == "dropped in":
            write_adapter(tmp_path / "root" / "x")
            await receiver.catalog.load("x", "x", inplace=False)
        else:
            await receiver.put("x", tar_of(write_adapter(tmp_path / "made")))
        if how == "replaced":
            await settle(watch)
            await receiver.put("x", tar_of(write_adapter(tmp_path / "other", {"lora_alpha": 9})))
        for _ in range(polls):
            await watch.poll()
        await receiver.catalog.unload("x")
        for _ in range(3):
            await settle(watch)
            assert names(receiver) == []
        refusal = receiver.catalog.refused.get("x")
        assert refusal is not None
        assert "it was unloaded or deleted over HTTP" in refusal.reason
        write_adapter(tmp_path / "root" / "x", {"lora_alpha": 10})
        await settle(watch)
        assert names(receiver) == ["x"]
        assert receiver.catalog.refused.all() == []


async def test_a_folder_that_goes_while_its_name_is_uploaded_does_not_take_the_upload_with_it(tmp_path: Path) -> None:
    async with watched(tmp_path / "root") as (receiver, watch):
        write_adapter(tmp_path / "root" / "x")
        await settle(watch)
        shutil.rmtree(tmp_path / "root" / "x")
        await watch.poll()
        unload, stored = receiver.catalog.unload, []

        async def upload_first(*arguments: Any) -> None:
            stored.append(await receiver.put("x", tar_of(write_adapter(tmp_path / "made", {"lora_alpha": 9}))))
            await unload(*arguments)

        receiver.catalog.unload = upload_first  # type: ignore[method-assign]
        await watch.poll()
        await until(lambda: not len(watch._unloads))
        assert receiver.catalog.get("x") is stored[0].info


async def test_an_upload_that_another_instance_has_replaced_does_not_come_back(tmp_path: Path) -> None:
    async with watched(tmp_path / "root") as (receiver, watch):
        await receiver.put("sent", tar_of(write_adapter(tmp_path / "made")))
        receiver.catalog.adopt("sent", "f" * 64, 8, 1000)
        await settle(watch)
        assert receiver.catalog.get("sent").digest == "f" * 64


async def test_a_folder_with_the_name_of_an_alias_is_left_out_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    async with receiving(tmp_path) as receiver:
        aliases = aliases_of(receiver)
        await aliases.point("prod", "sql-v7")
        watch = FolderWatch(tmp_path, receiver.catalog, aliases)
        write_adapter(tmp_path / "prod")
        for _ in range(2):
            await settle(watch)
        assert names(receiver) == []
        (record,) = caplog.records
        assert "'prod' is an alias" in record.getMessage()


async def test_a_folder_is_served_once_the_alias_of_its_name_is_gone(tmp_path: Path) -> None:
    async with receiving(tmp_path) as receiver:
        aliases = aliases_of(receiver)
        watch = FolderWatch(tmp_path, receiver.catalog, aliases)
        write_adapter(tmp_path / "prod")
        for adapter in ("sql-v7", "sql-v8"):
            await aliases.point("prod", adapter)
            await settle(watch)
            assert [one.name for one in receiver.catalog.refused.all()] == ["prod"]
            await aliases.remove_of(adapter)
            await aliases.point("prod", adapter)  # at once: the folder is still left out
            await watch.poll()
            assert names(receiver) == []
            await aliases.remove("prod")
        await watch.poll()
        assert names(receiver) == ["prod"]
        assert receiver.catalog.refused.all() == []


async def test_a_name_that_stands_for_another_folder_keeps_it(tmp_path: Path) -> None:
    async with watched(tmp_path) as (receiver, watch):
        write_adapter(tmp_path / "nested" / "x")
        loaded = await receiver.catalog.load("x", "nested/x", inplace=False)
        write_adapter(tmp_path / "x", {"lora_alpha": 9})
        await settle(watch)
        assert receiver.catalog.get("x") is loaded
        shutil.rmtree(tmp_path / "x")
        await settle(watch)
        assert names(receiver) == ["x"]
        assert json.loads((tmp_path / "nested" / "x" / CONFIG_NAME).read_text())["lora_alpha"] == 8


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: folder.mkdir(), "the folder is empty"),
    "pickle": (
        lambda folder: (write_adapter(folder) / TENSORS_NAME).rename(folder / "adapter_model.bin"),
        "the folder holds a pickle, adapter_model.bin; only adapter_model.safetensors is read",
    ),
    "nested": (
        lambda folder: [write_adapter(folder / f"checkpoint-{step}") for step in (500, 1000)],
        "but 'checkpoint-1000', 'checkpoint-500'; only folders directly in --adapters-dir are loaded",
    ),
    "deep": (lambda folder: write_adapter(folder / "name" / "checkpoint-5"), "but 'name/checkpoint-5'; only folders"),
    "half": (lambda folder: (write_adapter(folder) / CONFIG_NAME).unlink(), "the folder has no adapter_config.json"),
    "foreign": (
        lambda folder: (write_adapter(folder) / CONFIG_NAME).rename(folder / "x.gguf") and
        (folder / TENSORS_NAME).rename(folder / "adapters.safetensors"),
        "no adapter_model.safetensors, but 'adapters.safetensors', 'x.gguf'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
async def test_a_folder_without_an_adapter_is_named_with_what_it_holds_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    make, reason = OTHERS[kind]
    async with watched(tmp_path / "root") as (receiver, watch):
        make(tmp_path / "root" / "x")
        await watch.poll()
        assert logged(caplog) == [], "it may be half copied"
        for _ in range(2):
            await settle(watch)
        (message,) = logged(caplog)
        assert message.startswith(f"{str(tmp_path / 'root' / 'x')!r} in --adapters-dir is left out: ")
        assert reason in message
        (refusal,) = receiver.catalog.refused.all()
        assert (refusal.name, refusal.reason in message) == ("x", True)
        shutil.rmtree(tmp_path / "root" / "x")
        await watch.poll()
        assert receiver.catalog.refused.all() == []


async def test_a_folder_that_gets_its_files_late_is_no_longer_refused(tmp_path: Path) -> None:
    async with watched(tmp_path / "root") as (receiver, watch):
        (tmp_path / "root" / "x").mkdir()
        await settle(watch)
        assert [refusal.reason for refusal in receiver.catalog.refused.all()] == ["the folder is empty"]
        write_adapter(tmp_path / "root" / "x")
        await settle(watch)
        assert (names(receiver), receiver.catalog.refused.all()) == (["x"], [])


async def test_hidden_folders_files_and_those_of_file_systems_are_passed_over(tmp_path: Path) -> None:
    async with watched(tmp_path) as (receiver, watch):
        for name in (".cache", "lost+found"):
            (tmp_path / name).mkdir()
        (tmp_path / "README.md").touch()
        await settle(watch)
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
