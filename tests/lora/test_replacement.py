"""An adapter that is replaced or deleted over HTTP while its requests still read its files: they read those of their
own version, and no change of a name disturbs another one."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import AdapterBusy, CaraServeError, NotFound
from caraserve.lora import adapter_reader
from caraserve.lora.adapter import Adapter
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft import read_adapter
from tests.cluster.nodes import until
from tests.lora.folders import write_adapter
from tests.lora.uploads import LIMIT, Receiver, arriving, read_digest, tar_of


@pytest.fixture
def bodies(tmp_path: Path) -> list[bytes]:
    return [tar_of(write_adapter(tmp_path / f"made-{alpha}", {"lora_alpha": alpha})) for alpha in (8, 9)]


class Read:
    """A read of an adapter that has been asked for, and that begins, or goes on once it has opened the folder, when the
    test says so."""

    def __init__(self, receiver: Receiver, adapter: Adapter, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        loop, self._result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        self._reader, self._work = receiver.uploads.reader, list[Callable[[], None]]()
        self._reader.on_loop = lambda call: loop.call_soon_threadsafe(call) and None
        with monkeypatch.context() as patch:
            patch.setattr(self._reader.executor, "submit", self._work.append)
            self._reader.read(adapter.source, aligned_bytes(LIMIT), self._result.set_result)
        if moment == "opened":
            opened = threading.Event()

            def wait(*arguments: Any, **options: Any) -> HostAdapter:
                opened.set()
                self._go.wait(10)
                return read_adapter(*arguments, **options)

            monkeypatch.setattr(adapter_reader, "read_adapter", wait)
            self._reader.executor.submit(self._work.pop())
            opened.wait(10)

    async def digest(self) -> str:
        self._go.set()
        for work in self._work:
            self._reader.executor.submit(work)
        result = await self._result
        assert isinstance(result, HostAdapter), result
        return result.spec.digest


@pytest.mark.parametrize("moment", ["asked", "opened"])
@pytest.mark.parametrize("change", ["replaced", "deleted", "replaced and uploaded again"])
async def test_a_read_that_has_begun_gets_its_own_version(
    receiver: Receiver, bodies: list[bytes], change: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = (await receiver.put("new", bodies[0])).info.digest
    adapter = receiver.catalog.pin("new")
    read = Read(receiver, adapter, moment, monkeypatch)
    deletion = None
    if change == "deleted":
        deletion = asyncio.create_task(receiver.delete("new"))
        await until(lambda: receiver.catalog.find("new") is None)
    else:
        assert not (await receiver.put("new", bodies[1])).is_new
    if change == "replaced and uploaded again":
        await receiver.put("new", bodies[0])
    assert await read.digest() == digest
    assert deletion is None or not deletion.done()
    receiver.catalog.manager.unpin(adapter)
    await until(lambda: receiver.left() == ([] if change == "deleted" else ["new"]))
    if deletion is not None:
        await deletion
        with pytest.raises(NotFound):
            await receiver.delete("new")


async def test_requests_that_come_while_a_name_is_replaced_get_a_version_whose_files_are_there(
    receiver: Receiver, bodies: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry is written after the files have changed places: until then the name stands for the old version."""
    old = (await receiver.put("new", bodies[0])).info.digest
    put, pinned = receiver.registry.put, list[Adapter]()

    def write(info: object) -> None:
        pinned.append(receiver.catalog.pin("new"))
        assert read_digest(pinned[0]) == old
        put(info)  # type: ignore[arg-type]

    monkeypatch.setattr(receiver.registry, "put", write)
    new = (await receiver.put("new", bodies[1])).info.digest
    assert [adapter.digest for adapter in pinned] == [old]
    assert read_digest(pinned[0]) == old
    assert read_digest(receiver.catalog.pin("new")) == new


async def test_an_unloaded_adapter_keeps_its_files_while_another_one_takes_its_name(
    receiver: Receiver, bodies: list[bytes]
) -> None:
    old = (await receiver.put("new", bodies[0])).info.digest
    adapter = receiver.catalog.pin("new")
    unloading = asyncio.create_task(receiver.catalog.unload("new"))
    await until(lambda: receiver.catalog.find("new") is None)
    assert (await receiver.put("new", bodies[1])).is_new
    assert not unloading.done()
    assert read_digest(adapter) == old
    receiver.catalog.manager.unpin(adapter)
    await unloading
    await until(lambda: receiver.left() == ["new"])


async def test_another_name_that_was_loaded_from_an_uploaded_folder_keeps_its_version(
    receiver: Receiver, bodies: list[bytes]
) -> None:
    old = (await receiver.put("new", bodies[0])).info.digest
    await receiver.catalog.load("other", "new", inplace=False)
    await receiver.put("new", bodies[1])
    other = receiver.catalog.pin("other")
    assert read_digest(other) == other.digest == old
    receiver.catalog.manager.unpin(other)
    await receiver.catalog.unload("other")
    await until(lambda: receiver.left() == ["new"])


async def test_uploads_of_one_name_are_stored_in_the_order_in_which_they_are_complete(
    receiver: Receiver, bodies: list[bytes]
) -> None:
    slow = await arriving(receiver, bodies[0])
    waiting = receiver.catalog.pin("new")
    with pytest.raises(AdapterBusy, match="is being uploaded"):
        await receiver.delete("new")
    fast = await receiver.put("new", bodies[1])
    assert receiver.catalog.get("new") is fast.info
    digest = await slow.end()
    assert receiver.catalog.get("new").digest == digest == waiting.digest != fast.info.digest
    receiver.catalog.manager.unpin(waiting)
    await until(lambda: receiver.left() == ["new"])


async def test_a_name_that_was_given_and_deleted_while_an_upload_arrives_stands_for_nothing(
    receiver: Receiver, bodies: list[bytes]
) -> None:
    slow = await arriving(receiver, bodies[0])
    await receiver.put("new", bodies[1])
    await receiver.delete("new")
    with pytest.raises(NotFound):
        receiver.catalog.pin("new")
    digest = await slow.end()
    assert receiver.catalog.pin("new").digest == digest


async def test_an_upload_of_what_the_name_has_by_then_ends_well_for_its_requests(
    receiver: Receiver, bodies: list[bytes]
) -> None:
    """They read the folder of the other upload."""
    slow = await arriving(receiver, bodies[0])
    waiting = receiver.catalog.pin("new")
    digest = (await receiver.put("new", bodies[0])).info.digest
    assert await slow.end() == digest
    result, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()
    receiver.uploads.reader.read(
        waiting.source, aligned_bytes(LIMIT), lambda image: loop.call_soon_threadsafe(result.set_result, image)
    )
    assert (await result).spec.digest == digest


async def test_files_that_somebody_else_has_changed_are_an_error_that_names_no_hidden_folder(
    receiver: Receiver, bodies: list[bytes]
) -> None:
    await receiver.put("new", bodies[0])
    adapter = receiver.catalog.pin("new")
    await receiver.put("new", bodies[1])
    hidden = adapter.source.path
    write_adapter(hidden, {"lora_alpha": 10})
    manager = receiver.catalog.manager
    result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    manager.on_change(lambda: result.done() or adapter.error is None or result.set_result(None))
    loop = asyncio.get_running_loop()
    receiver.uploads.reader.on_loop = lambda call: loop.call_soon_threadsafe(call) and None
    manager.prefetch(adapter)
    await result
    changed = adapter.error
    assert changed is not None
    (hidden / TENSORS_NAME).unlink()
    second = loop.create_future()
    receiver.uploads.reader.read(adapter.source, aligned_bytes(LIMIT), second.set_result)
    gone = await second
    assert isinstance(gone, CaraServeError)
    for error in (changed, gone):
        assert (error.status, hidden.name in error.message, hidden.parent.name in error.message) == (400, 0, 0)
    assert "the adapter's files have changed" in changed.message
