"""Stage `demo`: the bundled demo is served on the device, and its greedy answers are compared with the CPU's.

The base model and each adapter answer, one request at a time and many at once. An answer may leave the CPU's where the
CPU itself hardly prefers one token: where the device takes the second most likely one, nearly as likely as the first.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import aiohttp

from caraserve import demo as bundled
from caraserve.bench.servers import own_server
from scripts.laboratory.gpu.results import Lines, StageResult, WrongResult
from scripts.laboratory.gpu.setup import CheckSetup

_NAMES = (bundled.BASE_NAME, *bundled.ADAPTER_NAMES)
_QUESTIONS = ("Tell me about the sea.", "What is bread?", "Describe a mountain.", "Tell me about the moon.")
# Difference of two log-probabilities with which the order of sums and roundings may decide, by --dtype.
_TIE = {"float32": 0.001, "bfloat16": 0.2}
_TIES_MOST = 0.1  # of all answers
_MEMORY = ("--kv-cache-bytes", "256MiB")  # a share would count what servers and stages beside this one have taken
_CPU = ("--device", "cpu", "--dtype", "float32")


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, the second most likely one, and how much less likely that is (log-probability)."""

    token: str
    second: str
    margin: float


Answer = tuple[Choice, ...]
Question = tuple[str, str]  # model, and what it is asked


@dataclass(frozen=True, slots=True)
class Served:
    """Answers of one server, one by one and at once; each is the CPU's but for `ties` of them."""

    dtype: str
    mode: str
    ready_s: float
    answers: int
    ties: int
    at_once: int
    at_once_s: float


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """All servers."""

    tokens: int  # of an answer, at most
    servers: tuple[Served, ...]


def demo(setup: CheckSetup) -> StageResult[DemoFigures]:
    """Runs the stage. Raises WrongResult for an answer that is not the CPU's, BackendFailed if no server starts."""
    return asyncio.run(_demo(setup))


async def _demo(setup: CheckSetup) -> StageResult[DemoFigures]:
    """Starts all servers at once: they take far longer to start than to answer."""
    lines, effort = Lines(), setup.effort
    questions = [(name, text) for text in _QUESTIONS[: effort.demo_prompts] for name in _NAMES]
    expected = asyncio.ensure_future(_answers_of_cpu(setup, questions))
    tasks = [
        asyncio.ensure_future(_served(setup, questions, expected, number, dtype, mode))
        for number, (dtype, mode) in enumerate(effort.demo_servers)
    ]
    try:
        servers = await asyncio.gather(*tasks)
    finally:
        for task in (expected, *tasks):
            task.cancel()
        await asyncio.gather(expected, *tasks, return_exceptions=True)  # ends the servers
    for each in servers:
        name = f"demo, {each.dtype}, {each.mode}"
        text = f"{each.answers} answers and {each.at_once} at once are the CPU's, but for {each.ties} near ties"
        lines.add(name, text, f"≤ {_TIES_MOST:.0%} ties", each.ties <= _TIES_MOST * (each.answers + each.at_once))
        lines.add("… its start, and all at once", f"{each.ready_s:.1f} s, {each.at_once_s:.2f} s")
    return StageResult(DemoFigures(effort.demo_tokens, tuple(servers)), lines.all)


async def _answers_of_cpu(setup: CheckSetup, questions: Sequence[Question]) -> dict[Question, Answer]:
    async with _asking(setup, "cpu", _CPU) as (ask, _):
        return {question: await ask(question) for question in questions}


async def _served(
    setup: CheckSetup,
    questions: Sequence[Question],
    expected: "asyncio.Future[dict[Question, Answer]]",
    number: int,
    dtype: str,
    mode: str,
) -> Served:
    label, streams = f"{dtype}, {mode}", setup.effort.demo_streams
    arguments = ("--device", "cuda", "--dtype", dtype, "--loading-mode", mode, *_MEMORY)
    async with _asking(setup, f"{number}", arguments) as (ask, ready_s):
        alone = [await ask(question) for question in questions]
        begun_s = time.monotonic()
        asked = [questions[index % len(questions)] for index in range(streams)]
        together = await asyncio.gather(*map(ask, asked))
        spent_s = time.monotonic() - begun_s
    right, ties = await asyncio.shield(expected), 0
    for question, answer in zip([*questions, *asked], [*alone, *together], strict=True):
        ties += is_tie(f"{label}: {' asked '.join(question)!r}", answer, right[question], _TIE[dtype])
    return Served(dtype, mode, ready_s, len(alone), ties, streams, spent_s)


def is_tie(what: str, got: Answer, expected: Answer, tie: float) -> bool:
    """Returns whether an answer leaves the expected one where two tokens are about as likely, False if it does not
    leave it. Raises WrongResult where it is another."""
    for place, (ours, right) in enumerate(zip_longest(got, expected)):
        if ours is not None and right is not None and ours.token == right.token:
            continue
        if ours is not None and right is not None and ours.token == right.second and right.margin <= tie:
            return True
        told = [None if choice is None else choice.token for choice in (ours, right)]
        margin = "" if right is None else f", by {right.margin:.3f} before {right.second!r}"
        raise WrongResult(f"{what}: token {place} is {told[0]!r}, and the CPU's is {told[1]!r}{margin}")
    return False


@asynccontextmanager
async def _asking(setup: CheckSetup, name: str, arguments: Sequence[str]) -> AsyncIterator[tuple[Any, float]]:
    """Starts a server; yields a function that returns its answer to a question, and the seconds of its start."""
    begun_s, registry = time.monotonic(), ("--registry", str(setup.folder / f"{name}.sqlite"))
    async with (
        own_server((*arguments, *registry), asyncio.Event(), caraserve=setup.caraserve) as server,
        aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(setup.budget_s)) as session,
    ):

        async def ask(question: Question) -> Answer:
            return await _ask(session, question, setup.effort.demo_tokens)

        yield ask, time.monotonic() - begun_s


async def _ask(session: aiohttp.ClientSession, question: Question, tokens: int) -> Answer:
    model, text = question
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": tokens,
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        answer = await response.json()
    with contextlib.suppress(KeyError):
        return tuple(_choice(each) for each in answer["choices"][0]["logprobs"]["content"])
    raise WrongResult(f"{model} asked {text!r}: {response.status} {answer}")


def _choice(content: dict[str, Any]) -> Choice:
    first, second = content["top_logprobs"]
    other = second if first["token"] == content["token"] else first
    return Choice(content["token"], other["token"], content["logprob"] - other["logprob"])
