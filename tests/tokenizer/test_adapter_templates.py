"""Chat templates of adapters: what the model's could do too, in a process that ends where one takes too much."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest

from caraserve.core.reasoning_grammar import ReasoningTokens
from caraserve.core.tenant import Tenant
from caraserve.cpu.lora_workers import fork_server
from caraserve.errors import InvalidRequest
from caraserve.tokenizer.adapter_templates import MAX_TEXT_CHARACTERS, AdapterTemplates
from caraserve.tokenizer.chat_template import ChatTemplate
from caraserve.tokenizer.process_pool import JobOwner
from caraserve.tokenizer.template_process import MAX_COMPILED_CHARACTERS
from caraserve.tokenizer.tool_format import HERMES

MARKS = ReasoningTokens(1, (2,))
OWNER = JobOwner(Tenant("client", "user"), "adapter")
PLAIN = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ style }}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "Grüße, 世界 🌍"}]
OPTIONS: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "kwargs": {"style": "!"}}
TOOLS = [{"type": "function", "function": {"name": "time"}}]
LOOP = "{% for a in 'x' * 1000 %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3
BOMBS = (
    "{% set n = namespace(x=9) %}{% for i in range(9) %}{% set n.x = n.x ** 1000 %}{% endfor %}",
    "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{{ '%99999999999d' % 1 }}",
    "{% for i in range(1000000) %}xxxxxxxxxxxx{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
)
UNFIT = ("{% for a in %}", "{{ " + "(" * 9000, LOOP * 30 + "{% endfor %}" * 30, "{{ x | nothing }}")


@asynccontextmanager
async def rendering(tool_call_parser: str | None = None) -> AsyncIterator[AdapterTemplates]:
    templates = AdapterTemplates({"bos_token": "<s>"}, tool_call_parser, MARKS)
    try:
        yield templates
    finally:
        await templates.close()


@pytest.fixture
def templates() -> AbstractAsyncContextManager[AdapterTemplates]:
    return rendering()


async def test_a_prompt_is_the_same_as_in_the_server_itself(templates: AdapterTemplates) -> None:
    template, here = await templates.load(PLAIN, OWNER), ChatTemplate(PLAIN, {"bos_token": "<s>"}, "here")
    for messages in (HELLO, HELLO * 50, [{"role": "user", "content": "long" * 100_000}]):
        for tools in (None, TOOLS):
            text = await template.render(messages, OWNER, **OPTIONS, tools=tools)
            assert text == here.render(messages, **OPTIONS, tools=tools)
    with pytest.raises(InvalidRequest, match="role tool, which") as refused:
        await template.render([*HELLO, {"role": "tool", "content": "x"}], OWNER, **OPTIONS)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("parser", [None, "hermes"])
async def test_a_template_without_tools_has_them_as_text_where_the_operator_names_their_form(
    parser: str | None,
) -> None:
    without = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    async with rendering(parser) as templates:
        template, other = await templates.load(without, OWNER), await templates.load(PLAIN, OWNER)
        assert (template.renders_tools, other.renders_tools) == (parser is not None, True)
        if parser is None:
            with pytest.raises(InvalidRequest, match=r"cannot render tools; .*--tool-call-parser"):
                await template.render(HELLO, OWNER, **OPTIONS, tools=TOOLS)
        else:
            text = await template.render(HELLO, OWNER, **OPTIONS, tools=TOOLS)
            assert text == ChatTemplate(without, {}, "here", parser).render(HELLO, **OPTIONS, tools=TOOLS)
            assert "You can call these functions" in text


async def test_what_takes_too_much_is_refused_and_costs_others_nothing(templates: AdapterTemplates) -> None:
    plain = await templates.load(PLAIN, OWNER)
    for source in BOMBS:
        bomb = await templates.load(source, OWNER)
        with pytest.raises(InvalidRequest, match="the chat template") as refused:
            await bomb.render(HELLO, OWNER, **OPTIONS)
        assert refused.value.param == "messages"
        assert len(await plain.render(HELLO, OWNER, **OPTIONS)) > 10


async def test_a_rendering_is_ended_after_half_a_second_on_the_cpu(templates: AdapterTemplates) -> None:
    before = getrusage(RUSAGE_CHILDREN)
    endless = await templates.load(ENDLESS, OWNER)
    with pytest.raises(InvalidRequest, match=r"more than 0\.5 s"):
        await endless.render(HELLO, OWNER, **OPTIONS)
    after = getrusage(RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4  # starting takes up to 1 s


async def test_what_does_not_compile_is_refused(templates: AdapterTemplates) -> None:
    for source in UNFIT:
        with pytest.raises(InvalidRequest, match="the chat template") as refused:
            await templates.load(source, OWNER)
        assert refused.value.param == "chat_template"


async def test_calls_and_reasoning_are_those_that_the_template_shows(templates: AdapterTemplates) -> None:
    plain = await templates.load(PLAIN, OWNER)
    assert (plain.tool_format, plain.reasoning_format) == (None, None)
    other = await templates.load("<tool_call>{{ tools }}{% if enable_thinking %}<think></think>{% endif %}", OWNER)
    assert other.tool_format == HERMES
    assert other.reasoning_format is not None
    assert (other.reasoning_format.tokens, other.reasoning_format.switch) == (MARKS, "enable_thinking")


async def test_more_templates_than_are_kept_compiled_render_all_the_same(templates: AdapterTemplates) -> None:
    comment = "{#" + "x" * (MAX_COMPILED_CHARACTERS // 3) + "#}"
    loaded = [await templates.load(f"{comment}{number}", OWNER) for number in range(5)]
    processes = set(templates._processes._processes)
    assert [await one.render(HELLO, OWNER, **OPTIONS) for one in loaded * 2] == list("01234" * 2)
    assert templates._processes._processes == processes


async def test_the_threads_that_compute_come_before_its_process(templates: AdapterTemplates) -> None:
    await templates.load("{{ messages[-1].content }}", OWNER)
    (process,) = templates._processes._processes
    assert os.getpriority(os.PRIO_PROCESS, process._process.pid) > fork_server.NICE  # that of compute threads


async def test_clients_that_leave_do_not_end_the_process(templates: AdapterTemplates) -> None:
    plain = await templates.load(PLAIN, OWNER)
    processes = set(templates._processes._processes)
    leaving = [asyncio.create_task(plain.render(HELLO, OWNER, **OPTIONS)) for _ in range(8)]
    while not templates.num_waiting:  # noqa: ASYNC110  # until one is on its way, and the others wait
        await asyncio.sleep(0)
    for one in leaving:
        one.cancel()
    await asyncio.wait(leaving)
    await plain.render(HELLO, OWNER, **OPTIONS)
    assert templates._processes._processes == processes


async def test_a_short_chat_does_not_wait_for_threads_that_encode_long_ones(templates: AdapterTemplates) -> None:
    is_over = threading.Event()
    plain = await templates.load(PLAIN, OWNER)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    blocked = asyncio.create_task(asyncio.to_thread(is_over.wait))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(10):
            assert len(await plain.render(HELLO, OWNER, add_generation_prompt=True)) > 10
    finally:
        is_over.set()
        await blocked


async def test_texts_that_would_take_long_to_copy_are_refused(templates: AdapterTemplates) -> None:
    plain = await templates.load(PLAIN, OWNER)
    with pytest.raises(InvalidRequest, match=f"{MAX_TEXT_CHARACTERS} are allowed"):
        await plain.render([{"role": "user", "content": "x" * (MAX_TEXT_CHARACTERS + 1)}], OWNER, **OPTIONS)
