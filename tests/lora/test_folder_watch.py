"""Folders that come, change and go in --adapters-dir while the server runs."""

import json
import logging
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

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
        await receiver.uploads.delete("sent")
        await settle(watch)
        assert names(receiver) == []


async def test_what_is_unloaded_after_the_first_look_at_its_upload_stays_unloaded(tmp_path: Path) -> None:
    async with watched(tmp_path / "root") as (receiver, watch):
        await receiver.put("sent", tar_of(write_adapter(tmp_path / "made")))
        await watch.poll()
        await receiver.catalog.unload("sent")
        await settle(watch)
        assert names(receiver) == []


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
