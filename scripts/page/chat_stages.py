"""What is looked at in the part of the page with conversations. Each stage begins and ends with a new conversation."""

import asyncio
import json
import os
import shlex
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.page.browser import Browser, Failed
from scripts.page.servers import ASCII_KEY, KEY

_ENDED = "document.querySelector('#stop').hidden && !document.querySelector('article[aria-busy]')"
_FACTS = {"TTFT", "TPOT", "tokens", "prompt", "total", "queued", "load", "prefill", "decode", "version"}
CURL = "a curl command"
_MARKDOWN = (
    "# Title\n\nSome **bold** and `code`, <b>no markup</b>, [a link](https://example.org/a_(b)) and "
    "[none](javascript:alert(1)).\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n- one\n  1. two\n\n```js\nlet a = '*';\n```\n"
)


async def give_key(page: Browser, chosen: Sequence[str] = ("caraserve-demo×", "pirate×")) -> None:
    """The page asks for the key, refuses a wrong one, and begins with the right one: these adapters are chosen."""
    await page.until("document.querySelector('#key-dialog').open", "the page does not ask for the API key")
    await page.type("wrong")
    await page.press("Enter")
    await page.until("document.querySelector('#key-error').textContent", "a wrong key is not refused")
    await page.type(KEY)
    await page.press("Enter")
    await page.until("document.querySelector('#state').textContent === 'serving'", "the numbers do not arrive")
    await page.until("document.querySelector('#chosen li')", "no adapter is chosen to answer")
    page.forget("status of 401")
    if (names := await page.texts("#chosen li")) != [*chosen]:
        raise Failed(f"chosen at first: {names}")


async def set_settings(page: Browser, **values: str) -> None:
    """Writes values into fields of the settings."""
    for name, value in values.items():
        await page.run(
            f"(() => {{ const one = document.querySelector('#settings [name={name}]'); one.value = {json.dumps(value)};"
            "one.dispatchEvent(new Event('input', { bubbles: true })) })()"
        )


async def choose(page: Browser, *names: str) -> None:
    """Chooses who answers, by the keyboard."""
    while await page.run("document.querySelectorAll('#chosen li').length"):
        await page.run("document.querySelector('#chosen button').click()")
    for name in names:
        await page.write("#picker", name)
        option = f"document.querySelector('#options .active span')?.textContent === {json.dumps(name)}"
        await page.until(option, f"the picker does not find {name}")
        await page.press("Enter")
        await page.until(f"document.querySelector('#chosen li:last-child').firstChild.data === {json.dumps(name)}", "?")
    await page.press("Escape")


async def say(page: Browser, prompt: str) -> list[dict[str, Any]]:
    """Sends a prompt and returns the answers of the last turn when they have ended."""
    await page.write("#prompt", prompt)
    await page.press("Enter")
    await page.until("document.querySelector('#prompt').value === ''", f"{prompt}: it is not sent")
    try:
        await page.until(_ENDED, "the answers do not end")
    except Failed as error:
        raise Failed(f"{prompt}: {error}: {await answers(page)}") from None
    return await answers(page)


async def answers(page: Browser) -> list[dict[str, Any]]:
    """Returns name, text, status and facts of the answers of the last turn."""
    found = json.loads(
        await page.run(
            "JSON.stringify([...document.querySelectorAll('.turn:last-child .answer')].map(card => ({"
            "name: card.querySelector('h3').textContent, status: card.querySelector('h3 + p').textContent,"
            "text: [...card.querySelectorAll('.markdown, .step > .plain')].map(one => one.textContent).join('|'),"
            "facts: [...card.querySelectorAll('.facts dt')].map(one => one.textContent),"
            "phases: card.querySelectorAll('.phases i').length})))"
        )
    )
    return list(found)


async def begin(page: Browser, *names: str, **settings: str) -> None:
    """Begins a conversation with these adapters and settings, all others at their defaults."""
    await page.run("document.querySelector('#tab-chat').click(); document.querySelector('#new').click()")
    await page.run("document.querySelector('#settings-form > button').click()")
    await choose(page, *names)
    await set_settings(page, temperature="0", **settings)


async def conversation(page: Browser) -> None:
    """Two adapters answer side by side, each with its own earlier answers; again; an edit; a reload; deletion."""
    await begin(page, "caraserve-demo", "pirate")
    found = await say(page, "Tell me about the sea.")
    if [one["name"] for one in found] != ["caraserve-demo", "pirate"] or "Arrr" not in found[1]["text"]:
        raise Failed(f"answers about the sea: {found}")
    for one in found:
        if (missing := _FACTS - set(one["facts"])) or one["phases"] != 4:
            raise Failed(f"the answer of {one['name']} lacks {missing or 'its phases'}")
        if not one["status"].endswith(" · complete") or not one["status"].startswith(("base model", "from ")):
            raise Failed(f"the answer of {one['name']} is {one['status']}")
    await say(page, "Tell me about cats.")
    sent = (await shown_as(page, "pirate", CURL)).split("-d ", 1)[1]
    messages = json.loads(shlex.split(sent)[0])["messages"]
    if [one["role"] for one in messages] != ["user", "assistant", "user"] or messages[1]["content"] != found[1]["text"]:
        raise Failed(f"pirate was sent {messages}")
    before = await answers(page)
    await page.click("[aria-label='Ask pirate again']")
    await page.until(_ENDED, "the answer that was asked for again does not end")
    if [one["text"] for one in await answers(page)] != [one["text"] for one in before]:
        raise Failed("at temperature 0 the same question has another answer")
    await page.click("[aria-label^='Edit prompt 1']")
    await page.until("document.activeElement.tagName === 'TEXTAREA'", "the prompt cannot be edited")
    await page.write("form.prompt textarea", "Tell me about bread.")
    await page.click("form.prompt button")
    await page.until(f"document.querySelectorAll('.turn').length === 1 && {_ENDED}", "later turns are not dropped")
    if "bread" not in (text := (await answers(page))[0]["text"].lower()):
        raise Failed(f"after an edit the answer is {text}")
    await page.load(await page.run("location.href"))
    await page.until("document.querySelectorAll('.answer').length === 2", "a reload loses the conversation")
    if (await answers(page))[0]["text"].lower() != text:
        raise Failed("a reload changes the conversation")
    await page.click("[aria-label^='Delete Tell me']")
    await page.until("!document.querySelector('.turn') && !document.querySelector('#conversations li')", "no deletion")


async def shown_as(page: Browser, name: str, kind: str) -> str:
    """Returns what was sent to an adapter last: "a curl command", or "Python"."""
    label = f"Show what was sent to {name} as {kind}"
    await page.run(f"document.querySelector(`.turn:last-child [aria-label='{label}']`).click()")
    text = await page.text("#text")
    await page.press("Escape")
    return text


async def ends(page: Browser) -> None:
    """An answer that is stopped, and one that is cut off, say so."""
    await begin(page, "caraserve-demo", "poet")
    await page.run(
        "new Promise(resolve => { document.querySelector('#prompt').value = 'Tell me about the sea.';"
        "document.querySelector('#send').click(); const timer = setInterval(() => {"
        "if (!/answering/.test(document.querySelector('article p')?.textContent)) return;"
        "clearInterval(timer); resolve() }, 1) })"
        ".then(() => document.querySelector('#stop').click())"
    )
    await page.until(_ENDED, "the answers are not stopped")
    if not any(one["status"].endswith("stopped") for one in await answers(page)):
        raise Failed(f"after Stop the answers are {await answers(page)}")
    await set_settings(page, max_tokens="2")
    if any(not one["status"].endswith("cut off at max. tokens") for one in await say(page, "Tell me about cats.")):
        raise Failed(f"answers of two tokens are {await answers(page)}")
    await set_settings(page, max_tokens="0")
    await page.write("#prompt", "This is not sent.")
    await page.press("Enter")
    await page.until(
        "document.querySelector('#settings-form :invalid') === document.activeElement", "0 tokens are sent"
    )


async def reasoning_and_markdown(page: Browser) -> None:
    """Reasoning is folded; Markdown is shown as elements, and nothing else of an answer becomes one."""
    await begin(page, "pirate")
    # The demo model does neither, so another answer takes the place of its own, in small parts.
    parts = [_MARKDOWN[at : at + 7] for at in range(0, len(_MARKDOWN), 7)]
    deltas = [{"reasoning_content": "It asks.", "reasoning": "It asks."}, *({"content": part} for part in parts)]
    lines = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas)
    await page.run(
        "window.kept = window.fetch; window.fetch = async (path, options) => options.method !== 'POST' ?"
        "window.kept(path, options) : new Response(new ReadableStream({ start(stream) {"
        "const write = text => stream.enqueue(new TextEncoder().encode(text)); write(': prefill 5 of 9 tokens\\n\\n');"
        f"window.go = () => {{ write({json.dumps(lines + 'data: [DONE]')}); stream.close() }} }} }}))"
    )
    await page.write("#prompt", "Show me Markdown.")
    await page.press("Enter")
    progress = "/prefill 5 of 9 tokens$/.test(document.querySelector('article p').textContent)"
    await page.until(progress, "the progress of a prompt is not shown")
    await page.run("window.go()")
    await page.until(_ENDED, "the answer does not end")
    await page.run("window.fetch = window.kept")
    shown = await page.run(
        "(() => { const at = selector => document.querySelector('.markdown ' + selector)?.textContent; return ["
        "at('h4'), at('strong'), at('p code'), at('a'), document.querySelector('.markdown a').href,"
        "at('th'), at('td.number'),"
        "at('ul ol li'), at('pre'), document.querySelectorAll('.markdown :is(b, script)').length,"
        "document.querySelector('.step details').open, document.querySelector('.reasoning').textContent] })()"
    )
    wanted = ["Title", "bold", "code", "a link", "https://example.org/a_(b)", "a", "2", "two", "let a = '*';", 0]
    if shown != [*wanted, False, "It asks."]:
        raise Failed(f"Markdown and reasoning are shown as {shown}")
    if "<b>no markup</b>" not in (text := await page.text(".markdown")) or "[none](javascript:alert(1))" not in text:
        raise Failed(f"markup in an answer is shown as {text}")


async def hostile_markdown(page: Browser) -> None:
    """Markdown that is made to take long takes time in proportion, and is nested no deeper than a few elements."""
    pieces = [
        "*a ",
        "[a](",
        "`",
        "> ",
        "  - ",
        "**a *b ",
        "|a|\n|-|\n",
        "1. ",
        "\n\n- ",
        "_a_b ",
        "~~a",
        "[" * 9,
        "```\n",
    ]
    found = await page.run(
        "import('./page/markdown.js').then(({ MarkdownView }) => "
        f"{json.dumps(pieces)}.map(piece => {{ const view = new MarkdownView(), began = performance.now();"
        "view.show(piece.repeat(20000 / piece.length));"
        "let depth = 0; for (let one = view.node; one; one = one.lastElementChild) depth++;"
        "return [performance.now() - began, depth] }))"
    )
    for piece, (took_ms, depth) in zip(pieces, found, strict=True):
        if took_ms > 500 or depth > 40:
            raise Failed(f"20,000 characters of {piece!r} take {took_ms:.0f} ms and are {depth} elements deep")


async def tools_and_schema(page: Browser) -> None:
    """A call is shown with a field for its result, which is sent; an answer follows a schema."""
    await begin(page, "caraserve-demo")
    await page.run("document.querySelector('[aria-label=\"Insert an example of a function\"]').click()")
    await set_settings(page, tool_choice="required")
    found = await say(page, "Tell me about cats.")
    if not found[0]["status"].endswith("calls a function"):
        raise Failed(f"an answer that must call a function: {found}")
    await page.write(".call textarea", "Cats sleep for most of the day.")
    await page.run("document.querySelector('.calls > button').click()")
    await page.until(f"document.querySelectorAll('.step').length === 2 && {_ENDED}", "the result is not answered")
    messages = json.loads(shlex.split((await shown_as(page, "caraserve-demo", CURL)).split("-d ", 1)[1])[0])["messages"]
    if [one["role"] for one in messages] != ["user", "assistant", "tool"] or "sleep" not in messages[2]["content"]:
        raise Failed(f"with a result the model was sent {messages}")
    await begin(page, "json")
    await page.run("document.querySelector('[aria-label=\"Insert an example of a schema\"]').click()")
    text = (await say(page, "Tell me about cats."))[0]["text"]
    if json.loads(text).keys() != {"topic", "kind", "answer"}:
        raise Failed(f"an answer that follows a schema: {text}")
    await set_settings(page, schema="{")
    await page.write("#prompt", "This is not sent.")
    await page.press("Enter")
    await page.until("/JSON/.test(document.activeElement.validationMessage)", "a wrong schema is sent")


async def snippets(page: Browser, folder: Path) -> None:
    """What the buttons show gives the same answer from a shell and from Python."""
    await begin(page, "pirate", stop="Whales")
    text = (await say(page, "Tell me about the sea."))[0]["text"].strip()
    if shutil.which("curl") is not None:
        events = await _output(folder, "bash", "-c", await shown_as(page, "pirate", CURL))
        data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for one in data for choice in one["choices"])
        if said.strip() != text:
            raise Failed(f"curl says {events}, the page {text}")
    if (said := await _output(folder, sys.executable, "-c", await shown_as(page, "pirate", "Python"))).strip() != text:
        raise Failed(f"Python says {said}, the page {text}")


async def _output(folder: Path, *command: str) -> str:
    """Returns what a command writes. Raises Failed with its errors if it fails."""
    given = os.environ | {"CARASERVE_API_KEY": ASCII_KEY}
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=given, stdout=PIPE, stderr=PIPE)
    written, errors = await process.communicate()
    if process.returncode != 0:
        raise Failed(f"{command[0]} fails: {errors.decode()}")
    return written.decode()


async def keyboard(page: Browser) -> None:
    """Tabs, the picker and the prompt work without a pointer."""
    await page.run("document.querySelector('#tab-chat').focus()")
    for key, name in (
        ("ArrowLeft", "server"),
        ("ArrowRight", "chat"),
        ("ArrowRight", "adapters"),
        ("ArrowLeft", "chat"),
    ):
        await page.press(key)
        if not await page.run(
            f"!document.querySelector('#panel-{name}').hidden && document.activeElement.id === 'tab-{name}'"
        ):
            raise Failed(f"{key} on the tabs does not show {name}")
    await page.run("document.querySelector('#picker').focus()")
    await page.press("ArrowDown")
    await page.until("document.querySelectorAll('#options li').length === 6", "the picker does not open")
    await page.press("ArrowDown")
    active = "document.querySelector('#picker').getAttribute('aria-activedescendant')"
    if await page.run(f"{active} !== 'option-0' || document.querySelector('#option-0').className !== 'active'"):
        raise Failed("an arrow does not choose in the picker")
    await page.press("Escape")
    if not await page.run("document.querySelector('#options').hidden && document.activeElement.id === 'picker'"):
        raise Failed("Escape does not close the picker")
