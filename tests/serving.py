"""Engines in this process, over the real CPU backend, for tests that compare tokens."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.config import EngineConfig, LoraConfig, LoraModule, ModelConfig
from caraserve.core.request import Finish, GenerateRequest, PromptEmbeds, SamplingParams, TokenLogprob
from caraserve.core.tenant import NO_TENANT, Tenant
from caraserve.engine.stats import EngineObservers
from caraserve.loop import Engine
from caraserve.serve import build_engine

MIB = 1 << 20
PROFILE = Path(__file__).parent / "profile.json"  # of some machine: which one changes no token


def model_config(folder: Path, dtype: str = "auto", max_model_len: int | None = None) -> ModelConfig:
    return ModelConfig(model=folder, served_model_name=("base",), dtype=dtype, max_model_len=max_model_len)


def lora_config(
    adapters: Mapping[str, Path],
    *,
    mode: str = "overlapped",
    device_bytes: int = 64 * MIB,
    host_bytes: int = 64 * MIB,
    adapter_roots: Sequence[Path] = (),
    link_mb_per_s: float | None = None,
    profile: Path | None = PROFILE,
    **fields: Any,
) -> LoraConfig:
    return LoraConfig(
        lora_modules=[LoraModule(name, path) for name, path in adapters.items()],
        loading_mode=mode,
        lora_pool_bytes=device_bytes,
        max_host_adapters_bytes=host_bytes,
        emulate_link_mb_per_s=link_mb_per_s,
        profile=profile,
        allow_runtime_lora_updating=True,
        allow_adapter_path=list(adapter_roots),
        **fields,
    )


def engine_config(
    *,
    seqs: int = 16,
    step_tokens: int | None = None,
    kv_bytes: int | None = 64 * MIB,
    prefix_caching: bool = True,
    threads: int = 1,
    **fields: Any,
) -> EngineConfig:
    return EngineConfig(
        device="cpu",
        max_num_seqs=seqs,
        max_num_batched_tokens=step_tokens,
        kv_cache_bytes=kv_bytes,
        enable_prefix_caching=prefix_caching,
        cpu_threads=threads,
        **fields,
    )


@contextlib.asynccontextmanager
async def running(
    model: ModelConfig, lora: LoraConfig, engine: EngineConfig, observers: EngineObservers | None = None
) -> AsyncIterator[Engine]:
    """Runs an engine; checks at the end that its counts add up and that no block, slot or pin is left."""
    async with AsyncExitStack() as stack:
        served = await build_engine(stack, model, lora, engine, observers)
        yield served.engine
        await served.engine.drain(timeout_s=30.0)
        served.engine.check()
        snapshot = served.engine.snapshot()
        assert snapshot.running == snapshot.waiting == snapshot.kv_used_blocks == 0
        assert served.engine.unread.held_bytes == 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole output of a finished request."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]
    finish: Finish
    embedding: bytes | None


_count = iter(range(1 << 62))


def submit(
    engine: Engine,
    prompt: Sequence[int],
    adapter: str | None = None,
    *,
    tenant: Tenant = NO_TENANT,
    cache_salt: str = "",
    priority: int = 0,
    embeds: bool = False,
    averages: bool = False,
    prompt_embeds: PromptEmbeds | None = None,
    **params: object,
) -> "asyncio.Task[Answer]":
    """Starts a request; greedy and without end token unless `params` say otherwise."""
    settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    asked = GenerateRequest(
        request_id=f"test-{next(_count)}",
        prompt_ids=tuple(prompt),
        adapter=adapter,
        params=SamplingParams(**settings),  # type: ignore[arg-type]
        arrival_s=time.monotonic(),
        tenant=tenant,
        cache_salt=cache_salt,
        priority=priority,
        embeds=embeds,
        averages=averages,
        prompt_embeds=prompt_embeds,
    )
    stream = engine.submit(asked)

    async def collect() -> Answer:
        text, ids, logprobs, prompt_logprobs, finish, embedding = "", [], [], [], None, None
        try:
            async for delta in stream:
                text += delta.text
                ids += delta.token_ids
                logprobs += delta.logprobs
                prompt_logprobs += delta.prompt_logprobs
                finish, embedding = delta.finish, delta.embedding
        finally:
            stream.cancel()
        assert finish is not None
        return Answer(text, ids, logprobs, prompt_logprobs, finish, embedding)

    return asyncio.create_task(collect())


def embed(
    engine: Engine, prompt: Sequence[int], adapter: str | None = None, *, cache_salt: str = "", averages: bool = False
) -> "asyncio.Task[Answer]":
    """Starts a request for the embedding of a prompt, or for the mean of all its hidden states."""
    return submit(engine, prompt, adapter, cache_salt=cache_salt, embeds=True, averages=averages, max_tokens=0)
