"""A serving engine over the CUDA backend with real CPU workers, on an emulated device whose link a test can stop."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from caraserve.gpu.assist import chunk_graphs
from caraserve.gpu.assist.assisted_prefill import AssistedPrefills
from caraserve.gpu.driver.streams import Lane
from caraserve.loop import Engine
from caraserve.model.families import load_plan
from tests.gpu.host_backend import Host, serving
from tests.oracle import models
from tests.oracle.oracle import Oracle
from tests.oracle.subject import Subject
from tests.serving import MIB, Answer, engine_config, lora_config, model_config, submit

LAYERS, CONTEXT = 2, 256
CORES = tuple(sorted(os.sched_getaffinity(0)))
PATIENCE_S = 60.0
TOKENS = 3


@dataclass
class AssistedEngine:
    """A serving engine, its device and its workers."""

    engine: Engine
    host: Host
    oracle: Oracle

    @property
    def assisted(self) -> AssistedPrefills:
        return self.host.parts.assisted

    @property
    def driver(self) -> Any:
        return self.host.driver

    def pids(self) -> list[int]:
        return [state.pid for state in self.host.backend.workers.states() if state.pid is not None]

    def signal_workers(self, number: signal.Signals) -> None:
        """Sends a signal to all workers."""
        for pid in self.pids():
            os.kill(pid, number)

    def ask(self, name: str | None, tokens: int, seed: int = 0, **params: Any) -> "asyncio.Task[Answer]":
        return submit(self.engine, prompt_of(tokens, seed), name, max_tokens=TOKENS, **params)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Polls a condition between two jobs of the launching thread, so that no job is seen half done."""
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(self.host.on_launching_thread, holds):  # noqa: ASYNC110 (no event of ours)
                await asyncio.sleep(0.001)

    async def until_asked(self) -> None:
        """Waits until workers have been asked for a layer."""
        await self.until(lambda: any(state.is_busy for state in self.host.backend.workers.states()))

    async def until_launched(self, prompts: int = 1) -> None:
        """Waits until chunks are on the lane, with their work orders written."""
        await self.until(lambda: len(self.assisted._in_flight) >= prompts)

    async def until_loaded(self) -> None:
        await self.until(lambda: not any(bound.is_loading for bound in self.host.parts.images.bound.values()))

    async def help_with(self, name: str, tokens: int, seed: int = 0) -> int:
        """Runs a prompt that only workers can compute, then loads its weights again. Returns the layers that workers
        computed."""
        before = self.assisted.slices
        self.driver.held = {Lane.COPY}
        answer = self.ask(name, tokens, seed)
        await self.until(lambda: not self.assisted.is_open and self.assisted.slices > before)
        self.driver.held = set()
        return await self.check(name, tokens, answer, seed)

    def predict_hand_offs(self, hand_off_s: float) -> None:
        """Sets the predicted time of a hand-off; the watchdog aborts after about five times that."""
        self.assisted.set_predictions(replace(self.assisted.predictions, hand_offs_s=lambda work: hand_off_s))

    async def check(self, name: str | None, tokens: int, answer: "asyncio.Task[Answer]", seed: int = 0) -> int:
        """Waits for the answer and checks it. Returns the number of layers that workers computed."""
        done = await asyncio.wait_for(answer, PATIENCE_S)
        assert done.finish.reason == "length", done.finish
        assert len(done.token_ids) == TOKENS
        self.oracle.check_greedy(prompt_of(tokens, seed), name, done.token_ids)
        assert (done.finish.phases.cpu_lora_ms > 0) == (done.finish.phases.cpu_layers > 0)
        return done.finish.phases.cpu_layers


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return models.prompt_of(random.Random(f"{tokens} {seed}"), tokens)


@asynccontextmanager
async def assisted_engine(
    subject: Subject, *, captured: bool = True, pipeline_groups: int | None = None, **device: Any
) -> AsyncIterator[AssistedEngine]:
    """Yields an engine in which weights are predicted never to arrive, so that idle workers compute every layer.
    `captured`: chunks are graphs; nothing else is."""
    model, adapters, oracle = subject
    device |= {"graph_bytes": chunk_graphs.expected_bytes(load_plan(model)) if captured else 0}
    memory = {"device_bytes": 2 * MIB, "host_bytes": 4 * MIB}
    lora = lora_config(adapters, mode="assisted", **memory, lora_cpus=CORES, pipeline_groups=pipeline_groups)
    settings = engine_config(seqs=6, step_tokens=256, kv_bytes=2 * MIB)
    async with serving(model_config(model, max_model_len=CONTEXT), lora, settings, **device) as (engine, host):
        assert host.backend.workers.await_all(PATIENCE_S)
        made = AssistedEngine(engine, host, oracle)
        made.predict_hand_offs(5.0)
        host.parts.context.queue.bytes_per_s = 1e-6
        try:
            yield made
        finally:
            made.driver.held.clear()
            made.signal_workers(signal.SIGCONT)
