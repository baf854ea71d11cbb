"""Uploads: what is taken, what is refused and why, and that a refused one leaves nothing behind."""

import asyncio
import hashlib
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from caraserve.core.lora_layout import aligned_bytes
from caraserve.errors import AdapterRejected, CaraServeError, Forbidden, PayloadTooLarge, Unreachable
from caraserve.lora.adapter import UploadSource
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft import inspect_adapter
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.lora.uploads import UploadClaims
from tests.cluster.nodes import until
from tests.lora.folders import SPEC, tensor_name, tensors_for, write_adapter
from tests.lora.uploads import (
    END,
    LIMIT,
    Receiver,
    arriving,
    entry,
    in_pieces,
    no_room,
    read_digest,
    source_path,
    tar_of,
)

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("step", [7, 1000, 1 << 20])
@pytest.mark.parametrize("inside", ["", "./", "checkpoint-1/"])
async def test_a_tar_becomes_the_adapter_of_its_files(receiver: Receiver, folder: Path, inside: str, step: int) -> None:
    stored = await receiver.put("new", tar_of(folder, inside), step=step)
    assert stored.is_new
    assert stored.info.digest == inspect_adapter(folder, SPEC).digest
    assert receiver.catalog.get("new") is stored.info
    assert receiver.left() == ["new"]
    assert (receiver.root / "new" / TENSORS_NAME).read_bytes() == (folder / TENSORS_NAME).read_bytes()


@pytest.mark.parametrize(
    "form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT], ids=["pax", "gnu", "ustar"]
)
async def test_every_format_of_tar_is_read(receiver: Receiver, folder: Path, form: int) -> None:
    assert (await receiver.put("new", tar_of(folder, form=form))).is_new


@pytest.mark.parametrize("place", ["query", "metadata"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
async def test_a_safetensors_body_has_its_configuration_beside_or_inside(
    receiver: Receiver, place: str, sized: bool
) -> None:
    config = json.dumps(CONFIG)
    body = save(tensors_for(), {"adapter_config": config} if place == "metadata" else None)
    claims = UploadClaims(len(body) if sized else None, config if place == "query" else None)
    stored = await receiver.put("new", body, claims)
    assert json.loads((receiver.root / "new" / CONFIG_NAME).read_text()) == CONFIG
    assert stored.info.rank == 4


def member(name: str) -> Callable[[Path], bytes]:
    return lambda folder: entry(name, b"x") + tar_of(folder)


def changed(changes: dict[str, object]) -> Callable[[Path], bytes]:
    return lambda folder: tar_of(write_adapter(folder, changes))


def not_finite(folder: Path) -> bytes:
    tensors = tensors_for()
    tensors[tensor_name(1, "q_proj", "B")][3, 1] = np.nan
    return tar_of(write_adapter(folder, None, tensors))


BAD: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "above": (member("../adapter_config.json"), "../adapter_config.json"),
    "absolute": (member("/adapter_config.json"), "leads outside"),
    "other above": (member("a/../../README.md"), "leads outside"),
    "checkpoint": (lambda folder: entry(f"c/{TENSORS_NAME}", b"x") + tar_of(folder), "in two folders"),
    "only below": (lambda folder: entry("a/", type=tarfile.DIRTYPE) + tar_of(folder, "a/b/"), "but a/b/adapter_config"),
    "two folders": (lambda folder: entry("a/adapter_config.json", b"{}") + tar_of(folder, "b/"), "two folders"),
    "twice": (lambda folder: entry("adapter_config.json", b"{}") + tar_of(folder), "adapter_config.json twice"),
    "symlink": (lambda folder: entry(CONFIG_NAME, type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a link"),
    "hard link": (lambda folder: entry(CONFIG_NAME, type=tarfile.LNKTYPE, linkname="x"), "a link"),
    "device": (lambda folder: entry(CONFIG_NAME, type=tarfile.CHRTYPE), "plain files"),
    "sparse": (lambda folder: entry(CONFIG_NAME, type=tarfile.GNUTYPE_SPARSE), "plain files"),
    "negative size": (lambda folder: entry(CONFIG_NAME, bytes(1024), size=-5), "with -5 bytes"),
    "renamed": (lambda folder: entry("p", b"21 path=../etc/passwd", type=tarfile.XHDTYPE) + tar_of(folder), "path"),
    "bad pax": (lambda folder: entry("p", b"99 x", type=tarfile.XHDTYPE) + tar_of(folder), "not valid"),
    "many folders": (lambda folder: entry("a/", type=tarfile.DIRTYPE) * 4097, "over 4096 members"),
    "long name": (lambda folder: entry("p", b"../x\0", type=tarfile.GNUTYPE_LONGNAME) + tar_of(folder), "../x"),
    "after its end": (lambda folder: tar_of(folder) + b"x", "after its end"),
    "compressed": (lambda folder: b"\x1f\x8b" + bytes(100), "compressed"),
    "GGUF": (lambda folder: b"GGUF" + bytes(1000), "`caraserve adapter import` makes them"),
    "a .bin": (lambda folder: entry("a/adapter_model.bin", b"x") + END, "`caraserve adapter import` makes them"),
    "text": (lambda folder: b"{}" * 600, "neither a tar nor a safetensors"),
    "empty": (lambda folder: b"", "has no adapter_model.safetensors"),
    "cut": (lambda folder: tar_of(folder)[:4000], "ends in the middle of adapter_model.safetensors"),
    "cut early": (lambda folder: tar_of(folder)[:300], "ends too early"),
    "no tensors": (lambda folder: entry(CONFIG_NAME, b"{}") + END, "has no adapter_model.safetensors"),
    "no config": (lambda folder: save(tensors_for()), "?config=JSON"),
    "bad metadata": (lambda folder: save(tensors_for(), {"adapter_config": "["}), "not a JSON object"),
    "field": (changed({"kasa_config": {"beta": 1}}), "kasa_config"),
    "tensor": (not_finite, "layers.1.self_attn.q_proj.lora_B.weight has values that are not finite"),
    "rank": (changed({"r": 5}), "layers.0.self_attn.q_proj.lora_A.weight has shape [4, 64]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
async def test_a_body_that_cannot_be_served_is_refused_with_the_reason_and_leaves_nothing(
    receiver: Receiver, tmp_path: Path, kind: str
) -> None:
    make, reason = BAD[kind]
    body = make(write_adapter(tmp_path / "made"))
    with pytest.raises(AdapterRejected) as refusal:
        await receiver.put("new", body)
    assert reason in refusal.value.message
    assert receiver.left() == []
    assert receiver.catalog.all() == []
    await receiver.put("new", tar_of(write_adapter(tmp_path / "good")))


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
@pytest.mark.parametrize("kind", ["tar", "safetensors", "zeros"])
async def test_a_body_larger_than_can_be_served_is_refused_early(receiver: Receiver, kind: str, sized: bool) -> None:
    large = {"x": np.zeros(LIMIT, np.float32)}
    tar = entry(CONFIG_NAME, b"{}") + entry(TENSORS_NAME, save(large))
    body = {"tar": tar, "safetensors": save(large), "zeros": bytes(6 * LIMIT)}[kind]
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        async for piece in in_pieces(body, 1 << 18):
            taken += len(piece)
            yield piece

    with pytest.raises(PayloadTooLarge):
        await receiver.uploads.put("new", pieces(), UploadClaims(len(body) if sized else None))
    assert taken < len(body)
    assert receiver.left() == []


@pytest.mark.parametrize("right", [True, False])
async def test_a_checksum_decides(receiver: Receiver, folder: Path, right: bool) -> None:
    body = tar_of(folder)
    digest = hashlib.sha256(body if right else body[:-1]).digest()
    claims = UploadClaims(len(body), checksums=(("Content-Digest", digest),))
    if right:
        assert (await receiver.put("new", body, claims)).is_new
        return
    with pytest.raises(AdapterRejected) as refusal:
        await receiver.put("new", body, claims)
    assert refusal.value.param == "Content-Digest"
    assert receiver.left() == []


async def test_a_safetensors_file_without_a_configuration_is_refused_with_its_header(
    receiver: Receiver,
) -> None:
    body = save(tensors_for())

    async def header() -> AsyncIterator[bytes]:
        yield body[:4000]
        await asyncio.Event().wait()

    with pytest.raises(AdapterRejected, match=r"\?config=JSON"):
        await receiver.uploads.put("new", header(), UploadClaims(len(body)))
    with pytest.raises(AdapterRejected, match="not valid JSON"):
        await receiver.put("new", body, UploadClaims(len(body), "{\udc80"))


async def test_an_adapter_that_requests_wait_for_is_checked_like_any_other(receiver: Receiver, tmp_path: Path) -> None:
    """Its tensors are checked as they arrive."""
    huge = {name: values * np.float32(1e20) for name, values in tensors_for().items()}
    body = tar_of(write_adapter(tmp_path / "huge", tensors=huge))
    upload, results = await arriving(receiver, body), list[object]()
    receiver.uploads.reader.read(receiver.catalog.pin("new").source, aligned_bytes(LIMIT), results.append)
    with pytest.raises(AdapterRejected, match="their product may reach"):
        await upload.end()
    await until(lambda: len(results) == 1)
    assert isinstance(results[0], Unreachable)


async def test_an_upload_whose_client_leaves_leaves_nothing(receiver: Receiver, folder: Path) -> None:
    upload = (await arriving(receiver, tar_of(folder))).upload
    assert len(receiver.left()) == 1
    upload.cancel()
    await asyncio.wait([upload])
    assert receiver.left() == []
    assert (await receiver.put("new", tar_of(folder))).is_new


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "broken"])
async def test_the_last_of_two_instances_to_complete_an_upload_of_one_name_gives_it(
    receiver: Receiver, folder: Path, is_whole: bool
) -> None:
    catalog, upload = receiver.catalog, await arriving(receiver, tar_of(folder), is_whole=is_whole)
    pinned = catalog.pin("new")
    assert isinstance(pinned.source, UploadSource)
    catalog.adopt("new", "f" * 64, 8, 1000)  # the other instance has been faster
    assert catalog.get("new").digest == "f" * 64
    (result,) = await asyncio.gather(upload.end(), return_exceptions=True)
    expected = result if isinstance(result, str) else "f" * 64
    assert isinstance(result, str) == is_whole
    assert (catalog.get("new").digest, catalog.pin("new").digest) == (expected, expected)
    assert pinned.digest == expected or not is_whole, "a request that came before has the adapter of this upload"
    assert receiver.left() == (["new"] if is_whole else [])


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("how", ["deleted", "replaced", "elsewhere"])
async def test_the_same_bytes_under_another_name_stay_when_a_name_changes(
    receiver: Receiver, tmp_path: Path, folder: Path, how: str, is_first: bool
) -> None:
    names = ["changing", "staying"] if is_first else ["staying", "changing"]
    for name in names:
        await receiver.put(name, tar_of(folder))
    if how == "deleted":
        await receiver.delete("changing")
    elif how == "elsewhere":
        digest = receiver.catalog.get("changing").digest
        receiver.catalog.adopt("changing", "f" * 64, 8, 1000)
        await receiver.uploads.discard("changing", digest)
    else:
        await receiver.put("changing", tar_of(write_adapter(tmp_path / "other", {"lora_alpha": 9})))
    await until(lambda: receiver.left() == sorted(["staying", *(["changing"] if how == "replaced" else [])]))
    assert source_path(receiver, "staying") == receiver.root / "staying"


@pytest.mark.parametrize("failing", ["registry", "disk"])
async def test_an_upload_that_cannot_be_stored_leaves_the_adapter_whose_place_it_would_take(
    receiver: Receiver, tmp_path: Path, folder: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_adapter(tmp_path / "other", {"lora_alpha": 9})
    first = await receiver.put("new", tar_of(folder))
    if failing == "registry":
        receiver.registry.close()
    else:
        monkeypatch.setattr(AdapterFolder, "exchange", no_room)
    with pytest.raises(CaraServeError, match="registry" if failing == "registry" else "cannot be stored"):
        await receiver.put("new", tar_of(other))
    adapter = receiver.catalog.pin("new")
    assert read_digest(adapter) == adapter.digest == first.info.digest
    assert receiver.left() == ["new"]


async def test_the_same_bytes_again_change_nothing(receiver: Receiver, folder: Path) -> None:
    first = await receiver.put("new", tar_of(folder))
    again = await receiver.put("new", tar_of(folder))
    assert (again.is_new, again.info) == (False, first.info)
    assert receiver.left() == ["new"]


async def test_without_a_root_uploads_are_refused_with_advice(receiver: Receiver, folder: Path) -> None:
    receiver.uploads._root = None
    with pytest.raises(Forbidden, match="--adapters-dir"):
        await receiver.put("new", tar_of(folder))
