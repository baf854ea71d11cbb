"""Adapters that clients upload: requests are admitted while the body arrives and computed as far as it has come, with
the tokens of peft; what breaks ends them with an error and leaves nothing behind."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from caraserve.cpu.backend import CpuBackend
from caraserve.errors import AdapterRejected, Unreachable
from caraserve.loop import Engine
from caraserve.lora.adapter import AdapterTier
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.lora.uploads import AdapterUploads, UploadClaims, UploadedAdapter
from caraserve.model.safetensors_reader import TensorFile
from caraserve.serve import build_engine
from tests.cluster.nodes import until
from tests.lora.uploads import left_in
from tests.oracle.models import ALL_TARGETS, Kinds
from tests.oracle.subject import Subject, make_subject
from tests.serving import engine_config, lora_config, model_config, submit

LAYERS = 3  # of the model
KINDS: Kinds = {
    "poet": {"rank": 8, "targets": ALL_TARGETS},
    "clerk": {"rank": 24, "targets": ALL_TARGETS, "dtype": "float16"},
    "activated": {"rank": 8, "targets": ALL_TARGETS, "invocation": [40, 41]},
    "head": {"rank": 8, "targets": (*ALL_TARGETS, "lm_head")},
    "saved": {"rank": 8, "targets": ALL_TARGETS, "saved": {"embed_tokens": [30, 50, 5]}},
}
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("uploads"), KINDS, family="llama2")


class Body:
    """The body of an upload, of which the test decides how much has arrived."""

    def __init__(self, folder: Path) -> None:
        self.data = (folder / TENSORS_NAME).read_bytes()
        self.config = (folder / CONFIG_NAME).read_text(encoding="utf-8")
        self.sha256 = hashlib.sha256(self.data).digest()
        with TensorFile(folder / TENSORS_NAME) as file:
            names = {layer: [name for name in file.names if f"layers.{layer}." in name] for layer in range(LAYERS)}
            self._ends = [max(map(file.end, names[layer])) for layer in range(LAYERS)]
        self._arrived = 0
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, layers: int) -> None:
        """Lets the first layers arrive, and a part of the next."""
        self._send_to(min(self._ends[layers - 1] + 100, len(self.data) - 1))

    def finish(self) -> None:
        self._send_to(len(self.data))
        self._pieces.put_nowait(b"")

    def _send_to(self, end: int) -> None:
        self._pieces.put_nowait(self.data[self._arrived : end])
        self._arrived = end

    async def pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._pieces.get():
            yield piece


@dataclass
class Server:
    engine: Engine
    uploads: AdapterUploads
    root: Path

    def put(self, name: str, body: Body, sha256: bytes | None = None) -> "asyncio.Task[UploadedAdapter]":
        checksums = (("Content-Digest", sha256 or body.sha256),)
        return asyncio.create_task(
            self.uploads.put(name, body.pieces(), UploadClaims(len(body.data), body.config, checksums))
        )

    def computed(self) -> list[int]:
        """Returns the computed layers of each prompt that waits for more of its adapter."""
        backend = self.engine._backend
        assert isinstance(backend, CpuBackend)
        return sorted(prefill.layer for prefill in backend._streamed._running)

    async def admitted(self, name: str) -> None:
        await until(lambda: self.engine.catalog.find(name) is not None)

    def left(self) -> list[str]:
        return left_in(self.root)


@contextlib.asynccontextmanager
async def served(subject: Subject, root: Path, mode: str = "pipelined", **adapters: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        lora = lora_config(adapters, mode=mode, adapters_dir=root)
        made = await build_engine(stack, model_config(subject.model, max_model_len=128), lora, engine_config())
        yield Server(made.engine, made.management.uploads, root)
        await made.engine.drain(timeout_s=30.0)
        made.engine.check()


@pytest.mark.parametrize("mode", ["pipelined", "auto", "overlapped"])
async def test_a_request_is_computed_as_far_as_its_adapter_has_arrived(
    subject: Subject, tmp_path: Path, mode: str
) -> None:
    async with served(subject, tmp_path, mode) as server:
        body = Body(subject.adapters["clerk"])
        upload = server.put("new", body)
        body.send(1)
        await server.admitted("new")
        task = submit(server.engine, PROMPT, "new")
        body.send(2)
        if mode != "overlapped":
            await until(lambda: server.computed() == [2])
        assert not task.done()
        body.finish()
        subject.oracle.check_greedy(PROMPT, "clerk", (await task).token_ids)
        info = (await upload).info
        assert task.result().finish.served_by == f"new@{info.digest}"
        adapter = server.engine.catalog.manager.find(info.digest)
        assert adapter is not None
        assert isinstance(adapter.source, AdapterFolder)
        found = adapter.tier, set(adapter.names), adapter.source.path
        assert found == (AdapterTier.DEVICE, {"new"}, tmp_path / "new")
        again = await submit(server.engine, PROMPT, "new", cache_salt="other")
        subject.oracle.check_greedy(PROMPT, "clerk", again.token_ids)
        assert server.engine.catalog.manager.counters.disk_reads == 1  # the upload itself


@pytest.mark.parametrize("kind", ["activated", "head"])
async def test_a_request_waits_for_an_adapter_that_no_side_batch_can_compute(
    subject: Subject, tmp_path: Path, kind: str
) -> None:
    async with served(subject, tmp_path) as server:
        body = Body(subject.adapters[kind])
        upload = server.put("new", body)
        body.send(1)
        await server.admitted("new")
        task = submit(server.engine, PROMPT, "new")
        body.send(2)
        await until(lambda: (found := server.engine.snapshot()).running + found.waiting > 0)
        assert server.computed() == []
        body.finish()
        await upload
        subject.oracle.check_greedy(PROMPT, kind, (await task).token_ids)


async def test_requests_are_admitted_after_the_upload_if_the_file_has_a_whole_embedding(
    subject: Subject, tmp_path: Path
) -> None:
    """Its changed rows are known when all of it has been compared with the base's."""
    async with served(subject, tmp_path) as server:
        body = Body(subject.adapters["saved"])
        upload = server.put("new", body)
        body.send(2)
        body.finish()
        await upload
        subject.oracle.check_greedy(PROMPT, "saved", (await submit(server.engine, PROMPT, "new")).token_ids)


async def test_requests_that_come_at_any_time_are_served(subject: Subject, tmp_path: Path) -> None:
    async with served(subject, tmp_path) as server:
        body, tasks = Body(subject.adapters["poet"]), []
        upload = server.put("new", body)
        body.send(1)
        await server.admitted("new")
        for layers in (2, 3):
            body.send(layers)
            tasks.append(submit(server.engine, PROMPT[:-layers], "new"))
        await until(lambda: server.computed() == [2, 2])
        body.finish()
        while not upload.done():
            if sum(not task.done() for task in tasks) < 16:  # on a busy machine, one per turn would fill the queue
                tasks.append(submit(server.engine, PROMPT[len(tasks) % 8 :], "new"))
            await asyncio.sleep(0)
        for task in tasks:
            answer = await task
            assert answer.finish.reason == "length"
        subject.oracle.check_greedy(PROMPT[:-2], "poet", (await tasks[0]).token_ids)


@pytest.mark.parametrize("how", ["checksum", "client leaves", "value"])
async def test_a_broken_upload_ends_its_requests_and_leaves_nothing(subject: Subject, tmp_path: Path, how: str) -> None:
    async with served(subject, tmp_path) as server:
        body = Body(subject.adapters["poet"])
        if how == "value":
            body.data = body.data[:-4] + b"\xff\xff\xff\xff"
        upload = server.put("new", body, bytes(32) if how == "checksum" else None)
        body.send(1)
        await server.admitted("new")
        streamed = submit(server.engine, PROMPT, "new")
        body.send(2)
        await until(lambda: server.computed() == [2])
        waiting = submit(server.engine, PROMPT[::-1], "new")
        if how == "client leaves":
            upload.cancel()
        else:
            body.finish()
        for task in (streamed, waiting):
            finish = (await task).finish
            assert isinstance(finish.error, Unreachable)
            assert "the upload of the adapter 'new' has failed" in finish.error.message
        with pytest.raises((AdapterRejected, asyncio.CancelledError)):
            await upload
        assert server.engine.catalog.find("new") is None
        assert server.left() == []
        await until(lambda: server.engine.catalog.manager._adapters == {})
        assert server.engine.catalog.manager._host_cache._arena.used_bytes == 0
        body = Body(subject.adapters["poet"])
        upload = server.put("new", body)
        body.finish()
        assert (await upload).is_new
        subject.oracle.check_greedy(PROMPT, "poet", (await submit(server.engine, PROMPT, "new")).token_ids)


async def test_an_adapter_that_is_being_replaced_serves_until_the_new_one_is_complete(
    subject: Subject, tmp_path: Path
) -> None:
    async with served(subject, tmp_path, new=subject.adapters["poet"]) as server:
        body = Body(subject.adapters["clerk"])
        upload = server.put("new", body)
        body.send(2)
        subject.oracle.check_greedy(PROMPT, "poet", (await submit(server.engine, PROMPT, "new")).token_ids)
        body.finish()
        assert not (await upload).is_new
        subject.oracle.check_greedy(PROMPT, "clerk", (await submit(server.engine, PROMPT, "new")).token_ids)


async def test_bytes_that_another_name_has_already_are_served_under_both(subject: Subject, tmp_path: Path) -> None:
    async with served(subject, tmp_path, old=subject.adapters["poet"]) as server:
        body = Body(subject.adapters["poet"])
        upload = server.put("new", body)
        body.send(1)
        await server.admitted("new")
        task = submit(server.engine, PROMPT, "new")
        body.send(2)
        await until(lambda: server.computed() == [2])
        body.finish()
        subject.oracle.check_greedy(PROMPT, "poet", (await task).token_ids)
        assert (await upload).info.digest == server.engine.catalog.get("old").digest
        adapters = server.engine.catalog.manager._adapters
        await until(lambda: list(adapters) == [server.engine.catalog.get("old").digest])
        for name in ("old", "new"):
            subject.oracle.check_greedy(PROMPT, "poet", (await submit(server.engine, PROMPT, name)).token_ids)


async def test_an_adapter_that_does_not_fit_is_refused_before_its_tensors_arrive(
    subject: Subject, tmp_path: Path
) -> None:
    async with served(subject, tmp_path) as server:
        body = Body(subject.adapters["poet"])
        body.config = json.dumps(json.loads(body.config) | {"r": 9})
        upload = server.put("new", body)
        body.send(1)
        with pytest.raises(AdapterRejected, match=r"lora_A.weight has shape"):
            await upload
        assert server.left() == []
