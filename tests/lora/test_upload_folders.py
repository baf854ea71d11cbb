"""The disk of uploads: when it is full, and what a server that was killed has left on it."""

import asyncio
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from caraserve.errors import StorageFull
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.upload_body import UploadBody
from caraserve.lora.upload_folders import UploadFolders
from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver, no_room, read_digest, receiving, tar_of


@pytest.mark.parametrize("full", ["files", "registry"])
async def test_a_full_disk_is_said_to_be_full(
    receiver: Receiver, folder: Path, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if full == "files":
        monkeypatch.setattr(UploadBody, "write", no_room)
    else:
        receiver.registry._connection.execute("PRAGMA max_page_count = 1")  # no more than it has
        row = AdapterInfo("old", "0" * 64, "/", 4, ("q_proj",), 1, 0.0)
        with suppress(StorageFull):
            for number in range(1000):
                receiver.registry.put(replace(row, name=f"old-{number}"))
    with pytest.raises(StorageFull) as refusal:
        await receiver.put("new", tar_of(folder))
    assert refusal.value.status == 507
    assert receiver.left() == []
    assert receiver.catalog.find("new") is None


def test_what_is_hidden_on_a_full_disk_is_its_servers_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, folder = UploadFolders(tmp_path), AdapterFolder(write_adapter(tmp_path / "x"))
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", no_room)
        folders.hide(folder)
    UploadFolders(tmp_path)  # another server starts
    assert [folder.path] == list(tmp_path.iterdir())
    folders.close()
    assert not folder.path.exists()


async def test_a_client_that_leaves_while_the_folder_is_made_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, go, made = UploadFolders.make, threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def make_slowly(folders: UploadFolders, path: Path) -> None:
        make(folders, path)
        loop.call_soon_threadsafe(made.set)
        go.wait(10)

    monkeypatch.setattr(UploadFolders, "make", make_slowly)
    async with receiving(tmp_path / "root") as receiver:
        upload = asyncio.create_task(receiver.put("new", tar_of(folder)))
        await made.wait()
        upload.cancel()
        go.set()
        await asyncio.wait([upload])
        assert upload.cancelled()
        assert receiver.left() == []


async def test_what_a_killed_server_left_is_removed_at_the_start(tmp_path: Path, folder: Path) -> None:
    """Not that of another server with the same root that runs, nor what another machine may use."""
    async with receiving(tmp_path / "root") as other:
        await other.put("new", tar_of(folder))
        pinned = other.catalog.pin("new")
        await other.put("new", tar_of(write_adapter(tmp_path / "other", {"lora_alpha": 9})))
        (running,) = [path for path in other.root.iterdir() if path.name[0] == "."]
        write_adapter(running.with_name(running.name[:-8] + "killed") / "half")
        for name, age_s in ((".caraserve-upload-old", 4000), (".caraserve-upload-new", 0)):
            write_adapter(other.root / name)
            os.utime(other.root / name, (time.time() - age_s,) * 2)
        gone = other.root / ".caraserve-upload-gone"
        gone.symlink_to("nothing")  # as if another server had removed it after it was listed
        async with receiving(other.root):
            left = {path.name for path in other.root.iterdir()}
            assert left == {gone.name, ".caraserve-upload-new", running.name, "new"}
            assert read_digest(pinned) == pinned.digest
    assert not running.exists(), "a server that ends leaves nothing"
