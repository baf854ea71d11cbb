"""Removal of uploaded files, by a deletion or for another instance's version: requests keep theirs until they end."""

import asyncio
from pathlib import Path

import pytest

from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.peft import inspect_adapter
from caraserve.lora.uploads import AdapterUploads, UploadClaims
from tests.cluster.nodes import until
from tests.lora.folders import SPEC, write_adapter
from tests.lora.uploads import (
    LIMIT,
    Arriving,
    Elsewhere,
    Receiver,
    in_pieces,
    read_digest,
    receiving,
    source_path,
    tar_of,
)


async def test_other_instances_remove_the_files_of_another_version_and_keep_those_of_the_same(
    tmp_path: Path, folder: Path
) -> None:
    digest, elsewhere = inspect_adapter(folder, SPEC).digest, Elsewhere()
    async with receiving(tmp_path / "root") as receiver:
        uploads = AdapterUploads(receiver.catalog, receiver.uploads.reader, receiver.root, LIMIT, [elsewhere])
        for name, digest_elsewhere in (("same", digest), ("other", "f" * 64)):
            receiver.catalog.adopt(name, digest_elsewhere, 8, 1000)
            body = tar_of(folder)
            await uploads.put(name, in_pieces(body, 1000), UploadClaims(len(body)))
        await uploads.close()
    assert elsewhere.removed == [("other", "f" * 64)]


@pytest.mark.parametrize("is_kept", [True, False])
async def test_the_deletion_of_an_adapter_of_another_instance_says_whether_that_one_keeps_its_files(
    tmp_path: Path, is_kept: bool
) -> None:
    async with receiving(tmp_path / "root") as receiver:
        elsewhere = Elsewhere(is_kept)
        uploads = AdapterUploads(receiver.catalog, receiver.uploads.reader, receiver.root, LIMIT, [elsewhere])
        receiver.catalog.adopt("far", "f" * 64, 8, 1000)
        assert await uploads.ended(await uploads.unregister("far")) is is_kept
        await uploads.close()
    assert elsewhere.removed == [("far", "f" * 64)]


async def test_files_that_were_not_uploaded_are_kept_wherever_they_are(receiver: Receiver, folder: Path) -> None:
    for path in ("own", "deep/nested"):
        write_adapter(receiver.root / path)
    await receiver.catalog.load("other", "deep/nested", inplace=False)
    await receiver.put("sent", tar_of(folder))
    names = ("own", "other", "sent", "none")
    assert [name for name in names if receiver.uploads.keeps_files(name)] == ["own", "other"]


async def test_a_folder_that_goes_for_another_instance_is_not_refused(receiver: Receiver, folder: Path) -> None:
    digest = (await receiver.put("sent", tar_of(folder))).info.digest
    await receiver.catalog.unload("sent")  # as the cluster's registry has it
    assert receiver.catalog.refused.get("sent") is not None
    await receiver.uploads.discard("sent", digest)
    assert receiver.catalog.refused.all() == []


async def test_a_folder_that_was_not_uploaded_is_never_replaced_nor_removed(receiver: Receiver, folder: Path) -> None:
    write_adapter(receiver.root / "own")
    await receiver.catalog.load("own", "own", inplace=False)
    with pytest.raises(AdapterRejected, match="was not uploaded"):
        await receiver.put("own", tar_of(folder))
    await receiver.delete("own")
    assert receiver.left() == ["own"]
    assert receiver.catalog.find("own") is None


async def test_files_that_another_instance_has_replaced_stay_until_their_last_request_has_ended(
    receiver: Receiver, folder: Path
) -> None:
    info = (await receiver.put("new", tar_of(folder))).info
    pinned = receiver.catalog.pin("new")
    removal = asyncio.create_task(receiver.uploads.discard("new", info.digest))
    receiver.catalog.adopt("new", "f" * 64, 8, 1000)
    receiver.catalog.manager.changed()
    await removal
    assert read_digest(pinned) == info.digest
    receiver.catalog.manager.unpin(pinned)
    await until(lambda: receiver.left() == [])


async def test_files_of_other_adapters_and_those_not_uploaded_are_not_removed_for_another_instance(
    receiver: Receiver, tmp_path: Path, folder: Path
) -> None:
    await receiver.put("new", tar_of(folder))
    await receiver.catalog.unload("new")
    own = inspect_adapter(write_adapter(tmp_path / "root" / "own"), SPEC).digest
    for name, digest in (("new", "f" * 64), ("own", own), ("none", own)):
        await receiver.uploads.discard(name, digest)
    assert receiver.left() == ["new", "own"]


async def test_files_whose_replacement_is_being_uploaded_are_left_to_the_upload(
    receiver: Receiver, tmp_path: Path, folder: Path
) -> None:
    body = tar_of(write_adapter(tmp_path / "other", {"lora_alpha": 9}))
    old = (await receiver.put("new", tar_of(folder))).info.digest
    upload = Arriving(receiver, body)
    await until(lambda: len(receiver.left()) == 2)  # the upload has a folder
    receiver.catalog.adopt("new", "f" * 64, 8, 1000)
    await receiver.uploads.discard("new", old)
    assert "new" in receiver.left()
    digest = await upload.end()
    assert inspect_adapter(receiver.root / "new", SPEC).digest == digest != old
    await until(lambda: receiver.left() == ["new"])


async def test_an_upload_waits_while_the_former_files_of_its_name_are_removed(receiver: Receiver, folder: Path) -> None:
    old = (await receiver.put("new", tar_of(folder))).info.digest
    receiver.catalog.adopt("new", "f" * 64, 8, 1000)
    removal = asyncio.create_task(receiver.uploads.discard("new", old))
    await asyncio.sleep(0)  # it has begun
    stored = await receiver.put("new", tar_of(folder))
    await removal
    assert receiver.catalog.get("new") is stored.info
    await until(lambda: receiver.left() == ["new"])


async def test_files_that_are_uploaded_again_at_once_outlast_their_removal_elsewhere(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the name is unloaded later, which keeps the files."""
    monkeypatch.setattr("caraserve.lora.uploads._HEARD_S", 0.01)
    async with receiving(tmp_path / "root") as receiver:
        digest = (await receiver.put("new", tar_of(folder))).info.digest
        async with asyncio.timeout(5):
            await receiver.uploads.discard("new", digest)
        await receiver.catalog.unload("new")
        assert receiver.left() == ["new"]


async def test_a_start_finds_nothing_of_a_deletion_that_was_cancelled_while_requests_ran(
    receiver: Receiver, folder: Path
) -> None:
    await receiver.put("new", tar_of(folder))
    pinned = receiver.catalog.pin("new")
    deletion = asyncio.create_task(receiver.delete("new"))
    await until(lambda: receiver.catalog.find("new") is None)
    deletion.cancel()
    await asyncio.wait([deletion])
    assert deletion.cancelled()
    assert not [name for name in receiver.left() if not name.startswith(".")]
    receiver.catalog.manager.unpin(pinned)
    await until(lambda: receiver.left() == [])


async def test_a_deletion_that_the_registry_refuses_changes_nothing(receiver: Receiver, folder: Path) -> None:
    await receiver.put("new", tar_of(folder))
    receiver.registry.close()
    with pytest.raises(CaraServeError, match="registry"):
        await receiver.delete("new")
    assert source_path(receiver, "new") == receiver.root / "new"
    assert receiver.left() == ["new"]
