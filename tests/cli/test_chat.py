"""`caraserve chat`: answers arrive piece by piece, commands, and errors in one line."""

import asyncio
import io
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console

from caraserve.cli.chat import Chat, ChatClient, Timing
from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.errors import CaraServeError
from caraserve.http.context import HttpTimings
from tests.http.apis.test_reasoning import WITHOUT_SWITCH
from tests.http.fake_engine import FakeEngine, FakeStream, FakeTokenizer, finish, spell
from tests.http.fleet import fleet
from tests.http.serving import serving
from tests.processes import free_ports


class Screen(Console):
    """A console that keeps what is printed, and tells when it prints."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__(file=io.StringIO(), soft_wrap=True, force_terminal=is_terminal)
        self.printed = asyncio.Event()

    def out(self, *objects: Any, **options: Any) -> None:
        super().out(*objects, **options)
        self.printed.set()

    @property
    def text(self) -> str:
        assert isinstance(self.file, io.StringIO)
        return self.file.getvalue()


@asynccontextmanager
async def chatting(engine: FakeEngine, **settings: Any) -> AsyncIterator[tuple[Chat, Screen]]:
    screen = Screen()
    async with serving(engine, **settings) as server, ChatClient.open(f"{server.url}/v1/", "sk-1") as client:
        yield Chat(client, screen, "a"), screen


def prompt(stream: FakeStream) -> str:
    return bytes(token for token in stream.request.prompt_ids if token < 256).decode()


async def test_an_answer_is_printed_with_its_time_and_rate() -> None:
    engine = FakeEngine()
    async with chatting(engine, api_key=("sk-1",)) as (chat, screen):
        assert await chat.handle("hello\n")
    answer, summary = screen.text.splitlines()
    assert answer == "Hi!"
    assert summary.startswith("[a: 3 tokens, TTFT ")
    assert "tokens/s]" in summary
    assert engine.requests[0].adapter == "a"


async def test_the_conversation_continues_with_another_adapter_until_it_is_cleared() -> None:
    engine = FakeEngine()
    async with chatting(engine) as (chat, _):
        for line in ("one", "/adapter b", "two", "/clear", "three"):
            assert await chat.handle(line)
    assert [prompt(stream) for stream in engine.streams] == [
        "user:one;assistant:",
        "user:one;assistant:Hi!;user:two;assistant:",
        "user:three;assistant:",
    ]
    assert [request.adapter for request in engine.requests] == ["a", "b", "b"]


async def test_reasoning_is_printed_but_not_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "reasoning_format", WITHOUT_SWITCH)
    texts = iter(("<think>\nIt greets.\n</think>\n\nHi!", "<think>\nNow wh"))
    engine = FakeEngine(script=lambda request: spell(request, next(texts)))
    async with chatting(engine) as (chat, screen):
        for line in ("one", "two"):
            await chat.handle(line)
    reasoning, answer, _, cut, *_ = [line for line in screen.text.splitlines() if line]
    assert (reasoning, answer, cut) == ("It greets.", "Hi!", "Now wh")
    assert "cut off" not in screen.text.splitlines()[2]
    assert prompt(engine.streams[1]) == "user:one;assistant:Hi!;user:two;assistant:"


async def test_the_instance_of_a_cluster_that_answered_is_named() -> None:
    async with fleet("a", "b") as running, ChatClient.open(running["b"].client.url, None) as client:
        screen = Screen()
        await Chat(client, screen, "a").handle("one")
    assert screen.text.splitlines()[-1].endswith("answered by a]")


async def test_the_progress_of_a_long_prompt_is_shown_until_the_answer_begins() -> None:
    engine, screen = FakeEngine(script=None), Screen(is_terminal=True)
    timings = HttpTimings(progress_s=0.01)
    async with serving(engine, timings=timings) as server, ChatClient.open(server.url, None) as client:
        handling = asyncio.create_task(Chat(client, screen, "a").handle("one"))
        (stream,) = await engine.submitted()
        stream.num_computed = lambda: 7
        while "[prompt: 7 of" not in screen.text:
            screen.printed.clear()
            await screen.printed.wait()
        stream.feed(TokenDelta("Aye", (1,)))
        stream.end()
        await handling
    before, answer = screen.text.split("\n")[0].rsplit("\r", 1)
    assert "tokens]" in before
    assert answer == "\x1b[2KAye"


async def test_an_answer_that_reaches_the_most_tokens_is_said_to_be_cut_off() -> None:
    engine = FakeEngine(script=lambda request: cut(request))
    async with chatting(engine) as (chat, screen):
        await chat.handle("one")
    assert screen.text.splitlines()[-1].endswith("cut off at the most tokens that it may have]")


def cut(request: GenerateRequest) -> list[TokenDelta]:
    return [TokenDelta("par", (1,)), TokenDelta("", (), finish=finish(request, 1, "length"))]


async def test_adapters_are_listed_by_a_part_of_their_names() -> None:
    async with chatting(FakeEngine()) as (chat, screen):
        await chat.handle("/adapters")
        await chat.handle("/adapters BAS")
    assert screen.text.splitlines() == ["  org/base", "* a", "  b", "  org/base"]


@pytest.mark.parametrize("line", ["/nothing", "/adapter c"])
async def test_a_wrong_command_changes_nothing_and_says_what_there_is(line: str) -> None:
    async with chatting(FakeEngine()) as (chat, screen):
        assert await chat.handle(line)
    assert chat.model == "a"
    assert "/adapters" in screen.text or "org/base, a, b" in screen.text


async def test_quit_leaves() -> None:
    async with chatting(FakeEngine()) as (chat, _):
        assert not await chat.handle(" /quit ")


async def test_what_arrived_before_a_stop_stays_in_the_conversation() -> None:
    engine = FakeEngine(script=lambda request: [TokenDelta("par", (1,))])
    async with chatting(engine) as (chat, screen):
        answering = asyncio.create_task(chat.handle("one"))
        await screen.printed.wait()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await engine.streams[0].cancelled.wait()
        engine.script = spell
        await chat.handle("two")
    assert prompt(engine.streams[1]) == "user:one;assistant:par;user:two;assistant:"


async def test_a_refused_message_is_not_part_of_the_conversation() -> None:
    engine = FakeEngine()
    async with chatting(engine) as (chat, screen):
        await chat.handle("x" * 2000)
        await chat.handle("short")
    assert "maximum context length" in screen.text.splitlines()[0]
    assert prompt(engine.streams[0]) == "user:short;assistant:"


async def test_an_answer_that_breaks_ends_with_its_error_in_one_line() -> None:
    error = CaraServeError("the device\nhas failed")
    engine = FakeEngine(script=lambda request: [TokenDelta("par", (1,)), *failed(request, error)])
    async with chatting(engine) as (chat, screen):
        await chat.handle("one")
    assert screen.text.splitlines() == ["par", "the device has failed"]


def failed(request: object, error: CaraServeError) -> list[TokenDelta]:
    stream = FakeStream(request)  # type: ignore[arg-type]
    stream.end(reason="error", error=error)
    return [stream._deltas.get_nowait()]


async def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    async with chatting(FakeEngine(script=lambda request: spell(request, "a\x1b[31mb\x07\tc\n"))) as (chat, screen):
        await chat.handle("one")
    assert "\x1b" not in screen.text
    assert "\x07" not in screen.text
    assert screen.text.startswith("a[31mb")


async def test_a_missing_key_and_a_missing_server_are_said_in_one_line() -> None:
    async with serving(FakeEngine(), api_key=("sk-2",)) as server, ChatClient.open(server.url, "sk-1") as client:
        with pytest.raises(CaraServeError, match=r"--api-key"):
            await client.models()
    (port,) = free_ports(1)
    async with ChatClient.open(f"http://127.0.0.1:{port}", None) as client:
        with pytest.raises(CaraServeError, match=r"^no server answers .* \(Connection refused\)"):
            await client.models()


async def test_another_kind_of_server_is_said_in_one_line() -> None:
    async with serving(FakeEngine()) as server, ChatClient.open(f"{server.url}/nothing", None) as client:
        with pytest.raises(CaraServeError) as caught:
            await client.models()
    assert "\n" not in caught.value.message


def test_the_rate_counts_tokens_after_the_first() -> None:
    timing = Timing(sent_s=1.0, first_s=1.25, last_s=2.25, tokens=11)
    assert (timing.ttft_ms, timing.tokens_per_s) == (250.0, 10.0)
    assert Timing(sent_s=1.0, first_s=1.25, last_s=1.25, tokens=1).tokens_per_s is None


async def test_ctrl_c_stops_the_answer_and_the_end_of_the_input_leaves() -> None:
    engine = FakeEngine(script=lambda request: [TokenDelta("par", (1,))])
    async with serving(engine) as server:
        command = (sys.executable, "-m", "caraserve", "chat", "b", "--url", server.url)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"one\n")
            assert await process.stdout.readexactly(3) == b"par"
            process.send_signal(signal.SIGINT)
            await engine.streams[0].cancelled.wait()
            engine.script = spell
            rest, errors = await process.communicate(b"two\n")
        finally:
            if process.returncode is None:
                process.kill()
    lines = rest.decode().splitlines()
    assert (process.returncode, errors) == (0, b"")
    assert lines[1].startswith("stopped")
    assert (lines[2], lines[3][:12]) == ("Hi!", "[b: 3 tokens")
