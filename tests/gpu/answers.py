"""Greedy answers of an engine over the CUDA backend and an emulated device, compared with those of transformers and
peft."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from caraserve.loop import Engine
from tests.gpu.host_backend import GRANULE_BYTES, PATIENCE_S, Host, serving
from tests.oracle.subject import Subject
from tests.serving import MIB, Answer, engine_config, lora_config, model_config

CONTEXT = 200

Asked = tuple[list[int], str | None]


def check(subject: Subject, asked: Sequence[Asked], answers: Sequence[Answer], tokens: int) -> None:
    for (prompt, adapter), answer in zip(asked, answers, strict=True):
        assert answer.finish.reason == "length", answer.finish
        assert len(answer.token_ids) == tokens
        subject.oracle.check_greedy(prompt, adapter, answer.token_ids)


def run_server(subject: Subject, use: Callable[[Engine, Host], Awaitable[None]]) -> None:
    """Starts an engine and calls `use` with it; fails if that takes a minute, as when an answer never comes."""

    async def serve() -> None:
        room = 24 * GRANULE_BYTES
        lora = lora_config(subject.adapters, mode="pipelined", device_bytes=room, host_bytes=4 * MIB)
        config = engine_config(seqs=6, step_tokens=48, kv_bytes=room)
        async with serving(model_config(subject.model, max_model_len=CONTEXT), lora, config) as (engine, host):
            await use(engine, host)

    asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))
