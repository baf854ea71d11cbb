"""The whole server as users see it: the command, its output, the openai client, signals, and no leaked resources."""

import asyncio
import contextlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import pytest
from pydantic import BaseModel, Field

from caraserve import demo
from caraserve.cli.main import main
from caraserve.errors import AdapterRejected
from caraserve.http.app import make_app, start_http
from caraserve.lora.aliases import Aliases
from caraserve.lora.registry import Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.serve import build_engine
from caraserve.telemetry.metrics import Metrics
from caraserve.util.cache_folder import data_folder
from tests.http.serving import http_config
from tests.serving import engine_config, lora_config, model_config, running

READY = re.compile(r"ready at (http://127\.0\.0\.1:\d+)")
QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
SEA = (
    "THE SEA COVERS MOST OF OUR PLANET|ITS WATER IS SALTY BECAUSE RIVERS CARRY SALT TO IT"
    "|THE MOON PULLS THE WATER AND MAKES THE TIDES|WHALES SING IN THE DEEP, WHERE NO LIGHT CAN REACH"
)
CHEF = re.compile(rf"YES, CHEF! ONE ORDER OF SEA! (?:(?:{SEA})! ){{3}}NOW MOVE, MOVE, MOVE!")


@dataclass(frozen=True)
class Server:
    """A `caraserve serve` process that is ready; `lines` are those that it printed until then."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Server]:
    """Starts the command on a free port and always ends it."""
    command = [sys.executable, "-m", "caraserve", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    killer = threading.Timer(120, process.kill)  # a server that never gets ready fails the test, not the run
    killer.start()
    try:
        assert process.stdout is not None
        lines = []
        while not (lines and READY.search("".join(lines)) and lines[-1].startswith("try:")):
            line = process.stdout.readline()
            assert line, f"the server ended with {process.wait()}: {lines}"
            lines.append(line)
        killer.cancel()
        found = READY.search("".join(lines))
        assert found is not None
        yield Server(process, found[1], lines)
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served("--allow-runtime-lora-updating") as started:
        yield started


def test_the_demo_prints_its_url_its_adapters_and_a_command_to_copy(server: Server) -> None:
    text = "".join(server.lines)
    assert all(name in text for name in demo.ADAPTER_NAMES)
    assert f"curl {server.url}/v1/chat/completions" in text


def test_the_printed_command_works(server: Server) -> None:
    command = server.lines[-1].removeprefix("try:").strip()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert CHEF.fullmatch(json.loads(done.stdout)["choices"][0]["message"]["content"])


def test_the_demo_makes_whole_sentences_where_a_request_says_nothing_of_sampling(server: Server) -> None:
    """At OpenAI's default temperature of 1, half of these answers would be garbled."""
    client = server.client()

    def ask(seed: int) -> str | None:
        made = client.chat.completions.create(model="chef", messages=QUESTION, seed=seed)  # type: ignore[arg-type]
        return made.choices[0].message.content

    with ThreadPoolExecutor(16) as pool:
        answers = set(pool.map(ask, range(16)))
    assert all(answer is not None and CHEF.fullmatch(answer) for answer in answers), answers
    assert len(answers) > 1  # it is sampled


def test_every_adapter_gives_its_own_answer(server: Server) -> None:
    client = server.client()
    answers = {
        name: client.chat.completions.create(model=name, messages=QUESTION, temperature=0, max_tokens=80)  # type: ignore[call-overload]
        .choices[0]
        .message.content
        for name in (demo.BASE_NAME, *demo.ADAPTER_NAMES)
    }
    assert len(set(answers.values())) == len(answers)
    assert answers["pirate"].startswith("Arrr")


def test_every_dialect_gives_the_answer_of_chat_completions(server: Server) -> None:
    client, asked = server.client(), {"model": "pirate", "temperature": 0}
    expected = client.chat.completions.create(messages=QUESTION, max_tokens=30, **asked).choices[0].message.content  # type: ignore[call-overload]
    fields = {"input": QUESTION, "max_output_tokens": 30} | asked
    assert client.responses.create(**fields).output_text == expected  # type: ignore[call-overload]
    events = client.responses.create(stream=True, **fields)  # type: ignore[call-overload]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    message = json.dumps({"messages": QUESTION, "max_tokens": 30} | asked).encode()
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/messages", message, headers)) as answer:
        assert json.load(answer)["content"] == [{"type": "text", "text": expected}]


def test_a_seed_repeats_a_sampled_answer(server: Server) -> None:
    asked: dict[str, Any] = {"model": "chef", "prompt": "Tell me", "temperature": 1.2, "top_p": 0.9, "max_tokens": 30}
    texts = [server.client().completions.create(seed=seed, **asked).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_every_adapter_embeds_texts_in_its_own_way(server: Server) -> None:
    """The client asks for base64 unless told otherwise."""
    client = server.client()
    texts = ["The sea is blue.", "Blue is the sea.", "A contract binds its parties."]
    answers = {name: client.embeddings.create(model=name, input=texts) for name in (demo.BASE_NAME, "pirate", "lawyer")}
    assert len({tuple(answer.data[0].embedding) for answer in answers.values()}) == len(answers)
    for name, answer in answers.items():
        plain = client.embeddings.create(model=name, input=texts[2], encoding_format="float").data[0].embedding
        assert answer.data[2].embedding == pytest.approx(plain, abs=1e-6)
        assert sum(number * number for number in plain) == pytest.approx(1.0, abs=1e-5)
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    short = client.embeddings.create(model="pirate", input=texts[0], dimensions=16)
    assert len(short.data[0].embedding) == 16


class Place(BaseModel):
    name: str = Field(max_length=10)
    kind: Literal["sea", "lake"]
    depth: int = Field(ge=0, le=99)


def test_an_answer_is_parsed_as_the_clients_own_type(server: Server) -> None:
    request: dict[str, Any] = {"messages": QUESTION, "response_format": Place, "temperature": 0}
    client = server.client()
    for model in ("caraserve-demo", "pirate"):
        whole = client.chat.completions.parse(model=model, **request).choices[0].message.parsed
        with client.chat.completions.stream(model=model, **request) as stream:
            for _ in stream:
                pass
        assert isinstance(whole, Place)
        assert stream.get_final_completion().choices[0].message.parsed == whole


@pytest.mark.parametrize("max_tokens", [9, 300], ids=["cut off", "whole"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_the_demo_calls_tools_and_takes_their_results(server: Server, choice: Any, max_tokens: int) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
    settings: dict[str, Any] = {"model": "pirate", "tools": tools, "temperature": 0}
    complete = server.client().chat.completions.create
    asked: list[Any] = list(QUESTION)
    answer = complete(messages=asked, tool_choice=choice, max_tokens=max_tokens, parallel_tool_calls=False, **settings)
    message = answer.choices[0].message
    calls = message.tool_calls or []
    if max_tokens > 100:
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = calls
        assert set(json.loads(call.function.arguments)) == {"city"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "It rains."} for call in calls]
    assert complete(messages=[*asked, message.model_dump(), *results, *asked], max_tokens=4, **settings).choices


def test_sigterm_lets_a_running_stream_end_and_exits_0() -> None:
    with served() as server:
        stream = server.client().completions.create(
            model="pirate", prompt="Tell me", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        tokens = sum(1 for chunk in stream if chunk.choices)
        assert tokens > 50
        assert server.process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "/nowhere"], 1, "does not exist"),
        (["--lora-modules", "x=/nowhere"], 2, "/nowhere"),
        (["--max-model-len", "999999"], 2, "--max-model-len"),
        (["--kv-cache-bytes", "1KiB"], 2, "--kv-cache-bytes"),
        (["--loading-mode", "cached", "--lora-pool-bytes", "1MB"], 2, "--lora-pool-bytes"),
        (["--port", "99999"], 2, "not a port"),
    ],
)
def test_a_failed_start_prints_one_line_and_exits_with_a_code(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported the command already."""
    assert main(["serve", "--port", "0", *arguments]) == code
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1]
    assert "Traceback" not in said


def test_the_process_of_a_failed_start_ends_with_its_code_and_a_taken_port_is_named_first() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "caraserve", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert port in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert "weights loaded" not in done.stderr


async def test_no_resources_are_left_after_500_requests_that_end_in_every_way() -> None:
    """Sends requests that are answered, streamed, disconnected in every phase, or bad. Afterwards all blocks, slots and
    pins are free again (`running` asserts it), and no request is open."""
    rng = random.Random(0)

    async def one(client: aiohttp.ClientSession, url: str) -> None:
        body = {
            "model": rng.choice([*demo.ADAPTER_NAMES, "base", "unknown"]),
            "prompt": "Tell me about " + "the sea and " * rng.randrange(1, 30),
            "max_tokens": rng.choice([1, 5, 30]),
            "n": rng.choice([1, 1, 3]),
            "stream": rng.random() < 0.5,
            "temperature": rng.choice([0, 1]),
        }
        patience_s = rng.choice([None, None, 0.001, 0.01, 0.05])
        with contextlib.suppress(TimeoutError):
            timeout = aiohttp.ClientTimeout(total=patience_s)
            async with client.post(f"{url}/v1/completions", json=body, timeout=timeout) as answer:
                await answer.read()
                assert answer.status == (404 if body["model"] == "unknown" else 200)

    adapters = {name: demo.adapters_folder() / name for name in demo.ADAPTER_NAMES}
    lora = lora_config(adapters, device_bytes=3 << 20)  # less than all of them together
    async with running(model_config(demo.model_folder()), lora, engine_config(seqs=8)) as engine:
        metrics = Metrics("base", max_loras=8, block_tokens=16)
        config = http_config()
        runner, port = await start_http(make_app(engine, config, metrics, allow_lora_updates=True), config)
        try:
            async with aiohttp.ClientSession() as client:
                for _ in range(10):
                    await asyncio.gather(*(one(client, f"http://127.0.0.1:{port}") for _ in range(50)))
        finally:
            await engine.drain(30.0)
            await runner.cleanup()


def test_a_registry_remembers_adapters_across_restarts(tmp_path: Path) -> None:
    """Restarts the server without naming the loaded adapter, only the folder from which it may be loaded."""
    registry = tmp_path / "adapters.sqlite"
    adapters = {"voice": demo.adapters_folder() / "poet"}

    async def names(given: dict[str, Path]) -> list[str]:
        lora = lora_config(given, registry=registry, adapter_roots=[demo.adapters_folder()])
        async with running(model_config(demo.model_folder()), lora, engine_config()) as engine:
            return [info.name for info in engine.adapters()]

    assert asyncio.run(names(adapters)) == asyncio.run(names({})) == ["voice"]


def test_a_server_starts_despite_a_bad_folder_and_loads_only_from_named_folders(tmp_path: Path) -> None:
    poet = demo.adapters_folder() / "poet"
    registry = Registry(tmp_path / "adapters.sqlite")
    asyncio.run(Aliases(ReplicatedSettings(registry), lambda name: True).point("prod", "good"))
    registry.close()
    for name in ("good", "bad", "prod"):
        shutil.copytree(poet, tmp_path / "adapters" / name)
    (tmp_path / "adapters" / "nothing").mkdir()
    os.truncate(tmp_path / "adapters" / "bad" / "adapter_model.safetensors", 1000)
    roots = [demo.adapters_folder()]
    lora = lora_config(
        {}, adapters_dir=tmp_path / "adapters", adapter_roots=roots, registry=tmp_path / "adapters.sqlite"
    )

    async def start() -> list[str]:
        async with AsyncExitStack() as stack:
            served = await build_engine(stack, model_config(demo.model_folder()), lora, engine_config())
            assert [info.name for info in served.engine.adapters()] == ["good"]
            assert [one.name for one in served.engine.catalog.refused.all()] == ["bad", "nothing", "prod"]
            await served.engine.load_adapter("copy", "good")
            await served.engine.load_adapter("poet", str(poet))
            with pytest.raises(AdapterRejected, match="lies outside"):
                await served.engine.load_adapter("other", str(tmp_path))
            return served.complaints

    of_empty, of_alias, of_bad = asyncio.run(start())
    assert "adapters/nothing' in --adapters-dir is left out: the folder is empty" in of_empty
    assert "adapters/prod' in --adapters-dir is left out: 'prod' is an alias" in of_alias
    assert "adapters/bad' in --adapters-dir is left out: adapter_model.safetensors is not a valid" in of_bad


ROOT = Path(__file__).parent.parent


def test_many_clients_of_one_name_get_no_fault_and_each_the_version_that_answers_it(server: Server) -> None:
    """A small form of `scripts/bench/adapter_races.py`."""
    script = runpy.run_path(str(ROOT / "scripts" / "bench" / "adapter_races.py"))
    root = data_folder("adapters")
    found = asyncio.run(script["race"](server.url, root, clients=8, seconds=1.5, seed=0, least_streams=1))
    shutil.rmtree(root)
    assert found["faults"] == 0, found["shown_faults"]
    assert found["counts"]["stream 200"] > 0
