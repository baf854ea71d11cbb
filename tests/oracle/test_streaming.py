"""Adapters that are downloaded layer by layer: prompts are computed as far as layers have arrived, other requests do
not wait, and tokens equal those of peft. Bytes that have not arrived are NaN; the test takes the network's part."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.config import LAYERWISE_MODES
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.cpu.backend import CpuBackend
from caraserve.errors import Unreachable
from caraserve.loop import Engine
from caraserve.lora.adapter import AdapterTier, Done, LayersArrived, Source
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.peft import read_adapter
from caraserve.model.families import load_plan
from caraserve.model.plan import DecoderPlan
from tests.cluster.nodes import until
from tests.oracle.models import ALL_TARGETS, Kinds, prompt_of
from tests.oracle.subject import make_subject
from tests.serving import Answer, embed, engine_config, lora_config, model_config, running, submit

LAYERS = 3  # of the model
WORKER_CORES = tuple(sorted(os.sched_getaffinity(0)))
PATIENCE_S = 60.0
NAN = 0xFF  # NaN in every dtype, if every byte has this value
KINDS: Kinds = {
    "poet": {"rank": 8, "targets": ALL_TARGETS},
    "clerk": {"rank": 24, "targets": ALL_TARGETS, "dtype": "float16"},
    "early": {"rank": 8, "targets": ALL_TARGETS, "layers": [0]},
}


@dataclass
class Sending:
    """An adapter that is being downloaded to the host cache."""

    name: str
    held: HostAdapter
    into: NDArray[np.uint8]
    done: Done
    came: LayersArrived

    def send(self, layers: int) -> None:
        end = self.held.spec.layer_ends[layers - 1]
        self.into[:end] = self.held.data[:end]
        self.came(HostAdapter(self.held.spec, self.into[: self.held.spec.num_bytes]), layers)

    def finish(self) -> None:
        self.send(LAYERS)
        self.done(HostAdapter(self.held.spec, self.into[: self.held.spec.num_bytes]))

    def give_up(self) -> None:
        self.done(Unreachable("no instance gives its bytes", retry_after_s=1.0))


class Network:
    """The other instances, as `Residency` uses them."""

    def __init__(self, plan: DecoderPlan) -> None:
        self._spec, self._sendings = plan, dict[str, Sending]()

    def read(self, source: Source, into: NDArray[np.uint8], done: Done, came: LayersArrived) -> None:
        assert isinstance(source, AdapterFolder)
        held = read_adapter(source.path, self._spec, aligned_bytes(into.nbytes))
        into[:] = NAN
        self._sendings[source.name] = Sending(source.name, held, into, done, came)

    async def sending(self, name: str) -> Sending:
        """Returns the download that is requested for an adapter, once it is."""
        await until(lambda: name in self._sendings)
        return self._sendings.pop(name)


class Serving:
    """A model with adapters and its oracle."""

    def __init__(self, folder: Path) -> None:
        self.model, self.adapters, self._oracle = make_subject(folder, KINDS, family="llama2")

    def prompt(self, tokens: int) -> list[int]:
        return prompt_of(random.Random(tokens), tokens)

    def check(self, prompt: list[int], adapter: str | None, answer: Answer) -> None:
        assert answer.finish.reason == "length"
        self._oracle.check_greedy(prompt, adapter, answer.token_ids)

    def check_embedding(self, prompt: list[int], adapter: str | None, answer: Answer) -> None:
        self._oracle.check_embedding(prompt, adapter, answer.embedding)

    @contextlib.asynccontextmanager
    async def served(
        self, mode: str = "pipelined", *, kv_blocks: int = 200, device_bytes: int = 64 << 20, workers: bool = False
    ) -> AsyncIterator[tuple[Engine, Network]]:
        cpus = WORKER_CORES if workers else None
        lora = lora_config(self.adapters, mode=mode, lora_cpus=cpus, device_bytes=device_bytes)
        plan = load_plan(self.model)
        engine = engine_config(kv_bytes=kv_blocks * 16 * plan.kv_bytes_per_token(4))
        async with running(model_config(self.model, max_model_len=128), lora, engine) as served:
            if workers:
                assert backend_of(served).workers.await_all(PATIENCE_S)
            network = Network(plan)
            served.catalog.manager._host_loader._read = network.read
            yield served, network


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Serving:
    return Serving(tmp_path_factory.mktemp("streaming"))


def backend_of(engine: Engine) -> CpuBackend:
    backend = engine._backend
    assert isinstance(backend, CpuBackend)
    return backend


def computed(engine: Engine) -> list[int]:
    """Returns the computed layers of each prompt that waits for more of its adapter."""
    return sorted(prefill.layer for prefill in backend_of(engine)._streamed._running)


async def until_computed(engine: Engine, *layers: int) -> None:
    await until(lambda: computed(engine) == list(layers))


async def begun(
    engine: Engine, network: Network, name: str, prompt: list[int]
) -> "tuple[Sending, asyncio.Task[Answer]]":
    """Starts a request for an adapter of which one layer has arrived and been computed."""
    before = len(computed(engine))
    task = submit(engine, prompt, name)
    sending = await network.sending(name)
    sending.send(1)
    await until_computed(engine, *[1] * (before + 1))
    return sending, task


@pytest.mark.parametrize("workers", [False, True], ids=["alone", "helped"])
@pytest.mark.parametrize("mode", LAYERWISE_MODES)
async def test_layers_are_computed_before_the_next_ones_arrive_and_others_decode_meanwhile(
    subject: Serving, mode: str, workers: bool
) -> None:
    prompt, other = subject.prompt(40), subject.prompt(9)
    async with subject.served(mode, workers=workers) as (engine, network):
        sending, task = await begun(engine, network, "clerk", prompt)
        sending.send(2)
        await until_computed(engine, 2)
        subject.check(other, None, await submit(engine, other, None, max_tokens=20))
        assert computed(engine) == [2]
        sending.finish()
        subject.check(prompt, "clerk", await task)


async def test_a_prompt_is_embedded_as_far_as_its_adapter_has_come(subject: Serving) -> None:
    """Its numbers are read after the last layers, beside another prompt that is embedded meanwhile."""
    prompt, other = subject.prompt(40), subject.prompt(9)
    async with subject.served() as (engine, network):
        task = embed(engine, prompt, "clerk")
        sending = await network.sending("clerk")
        sending.send(1)
        await until_computed(engine, 1)
        subject.check_embedding(other, None, await embed(engine, other))
        sending.finish()
        subject.check_embedding(prompt, "clerk", await task)


async def test_workers_compute_layers_that_are_only_in_the_host_cache(subject: Serving) -> None:
    """Over a link on which nothing arrives."""
    prompt = subject.prompt(40)
    async with subject.served("assisted", workers=True) as (engine, network):
        backend = backend_of(engine)
        backend.emulate_link(1.0)
        sending, task = await begun(engine, network, "clerk", prompt)
        assert backend.slices_handed_off > 0
        sending.finish()
        answer = await task
        subject.check(prompt, "clerk", answer)
        assert answer.finish.phases.cpu_layers == LAYERS * len(answer.token_ids)


@pytest.mark.parametrize("first", ["poet", "clerk"])
async def test_of_two_streamed_prefills_the_one_with_arrived_layers_is_computed(subject: Serving, first: str) -> None:
    prompt = subject.prompt(30)
    async with subject.served() as (engine, network):
        under_way = {name: await begun(engine, network, name, prompt) for name in ("poet", "clerk")}
        sending, task = under_way.pop(first)
        sending.finish()
        subject.check(prompt, first, await task)
        await until_computed(engine, 1)
        ((last, (sending, task)),) = under_way.items()
        sending.finish()
        subject.check(prompt, last, await task)


async def test_an_adapter_with_empty_last_layers_is_awaited_to_its_end(subject: Serving) -> None:
    prompt = subject.prompt(30)
    async with subject.served() as (engine, network):
        task = submit(engine, prompt, "early")
        sending = await network.sending("early")
        sending.send(LAYERS)
        await until_computed(engine, LAYERS - 1)
        sending.finish()
        subject.check(prompt, "early", await task)


async def test_a_failed_download_is_reported_and_the_next_request_is_served(subject: Serving) -> None:
    prompt, other = subject.prompt(40), subject.prompt(9)
    async with subject.served() as (engine, network):
        decoding = submit(engine, other, None, max_tokens=60)
        sending, task = await begun(engine, network, "poet", prompt)
        second = submit(engine, subject.prompt(11), "poet")
        sending.give_up()
        for failed in (await task, await second):
            assert failed.finish.reason == "error"
            assert isinstance(failed.finish.error, Unreachable)
            assert failed.token_ids == []
        engine.check()
        assert engine.catalog.manager._host_cache._arena.used_bytes == 0
        again, task = await begun(engine, network, "poet", prompt)
        again.finish()
        subject.check(prompt, "poet", await task)
        subject.check(other, None, await decoding)


async def test_a_cancelled_request_frees_everything_while_the_download_stalls(subject: Serving) -> None:
    prompt = subject.prompt(40)
    async with subject.served() as (engine, network):
        sending, task = await begun(engine, network, "poet", prompt)
        task.cancel()
        await until(lambda: engine.snapshot().kv_used_blocks == 0)
        assert computed(engine) == []
        task = submit(engine, prompt, "poet")
        await until_computed(engine, 1)
        sending.finish()
        subject.check(prompt, "poet", await task)


async def test_a_streamed_prefill_is_recalled_when_others_need_its_blocks(subject: Serving) -> None:
    prompt, other = subject.prompt(100), subject.prompt(60)
    async with subject.served(kv_blocks=10) as (engine, network):
        sending, task = await begun(engine, network, "poet", prompt)
        subject.check(other, None, await submit(engine, other, None, max_tokens=30))
        assert computed(engine) == []
        sending.send(2)
        sending.finish()
        subject.check(prompt, "poet", await task)


@pytest.mark.parametrize("mode", LAYERWISE_MODES)
async def test_no_request_waits_for_layers_that_cannot_be_copied(subject: Serving, mode: str) -> None:
    prompt = subject.prompt(40)
    async with subject.served(mode) as (engine, network):
        sending, task = await begun(engine, network, "poet", prompt)
        sending.send(2)
        await until_computed(engine, 2)
        link = backend_of(engine)._link
        works, link.copy = link.copy, fails  # type: ignore[method-assign]
        sending.finish()
        failed = await task
        assert failed.finish.reason == "error"
        assert "could not be copied" in failed.finish.error.message
        link.copy = works  # type: ignore[method-assign]
        subject.check(prompt, "poet", await submit(engine, prompt, "poet"))


def fails(into: NDArray[np.uint8], what: NDArray[np.uint8]) -> None:
    raise MemoryError("no room")


async def test_a_request_is_served_to_its_end_after_its_adapter_is_unloaded(subject: Serving) -> None:
    prompt = subject.prompt(40)
    async with subject.served() as (engine, network):
        sending, task = await begun(engine, network, "poet", prompt)
        unloading = asyncio.create_task(engine.unload_adapter("poet"))
        await until(lambda: engine.catalog.find("poet") is None)
        sending.send(2)
        await until_computed(engine, 2)
        sending.finish()
        subject.check(prompt, "poet", await task)
        await unloading
        assert engine.catalog.manager._host_cache._arena.used_bytes == 0


async def test_a_local_adapter_is_served_while_a_downloading_one_holds_memory(subject: Serving) -> None:
    """The device has memory for one adapter."""
    prompt = subject.prompt(40)
    sizes = [read_adapter(subject.adapters[name], load_plan(subject.model), aligned_bytes(1 << 20)).spec.num_bytes
             for name in ("poet", "clerk")]  # fmt: skip
    async with subject.served(device_bytes=max(sizes)) as (engine, network):
        sending, task = await begun(engine, network, "clerk", prompt)
        sending.finish()
        subject.check(prompt, "clerk", await task)
        sending, task = await begun(engine, network, "poet", prompt)
        assert [version.tier for version in engine.catalog.manager.on_device()] == []
        subject.check(prompt, "clerk", await submit(engine, prompt, "clerk"))
        assert computed(engine) == []
        sending.send(2)
        assert engine.catalog.manager._names["poet"].tier is AdapterTier.READING
        sending.finish()
        subject.check(prompt, "poet", await task)
