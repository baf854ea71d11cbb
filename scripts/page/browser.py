"""Headless Chromium with one page, driven by the DevTools protocol."""

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
)
_START_S, _COMMAND_S, _WAIT_S = 60.0, 60.0, 60.0
_LOOK_S = 0.05  # between two looks at whether something has happened
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "Delete": (46, ""), "End": (35, "")}
_KEYS |= {"ArrowDown": (40, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "Backspace": (8, "")}


class Failed(Exception):
    """The page is not as it should be."""


def program() -> str | None:
    """The browser that is installed; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page in Chromium. `complaints`: errors in its console; `fetched`: the addresses that it has asked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []
        self.fetched: set[str] = set()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends one command and returns its result; notes events that arrive meanwhile. Raises Failed."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            try:
                message = await self._socket.receive_json(timeout=_COMMAND_S)
            except TimeoutError:
                raise Failed(f"the browser does not answer {method} in {_COMMAND_S:.0f} s") from None
            except aiohttp.WSMessageTypeError:
                raise Failed(f"the browser has ended before {method}") from None
            if message.get("id") == self._number:
                if "error" in message:
                    raise Failed(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.fetched.add(params["request"]["url"])

    async def run(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, or of its promise. Raises Failed."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise Failed(f"{expression}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    async def until(self, expression: str, what: str) -> None:
        """Waits until an expression is true. It may fail while the page is still loading. Raises Failed, which says
        `what` is wrong."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + _WAIT_S
        while not await self.run(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            if clock() > ends_s:
                raise Failed(f"after {_WAIT_S:.0f} s: {what}")
            await asyncio.sleep(_LOOK_S)

    def forget(self, part: str) -> None:
        """Drops complaints that were meant to come."""
        self.complaints = [one for one in self.complaints if part not in one]

    async def text(self, selector: str) -> str:
        """Returns the text of an element, empty if there is none."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    async def texts(self, selector: str) -> list[str]:
        """Returns the texts of all elements that match."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)"
        return [str(text) for text in await self.run(found)]

    async def click(self, selector: str) -> None:
        """Presses the left button over the middle of an element, which is scrolled into sight. Raises Failed."""
        place = await self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one?.scrollIntoView({ block: 'center' });"
            "const { x, y, width, height } = one?.getBoundingClientRect() ?? {};"
            "return width ? [x + width / 2, y + height / 2] : null })()"
        )
        if place is None:
            raise Failed(f"there is no {selector} to click")
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def write(self, selector: str, text: str) -> None:
        """Replaces the text of a field, as by typing."""
        await self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.focus(); one.select?.() }})()"
        )
        await (self.type(text) if text else self.press("Delete"))

    async def type(self, text: str) -> None:
        """Types into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Presses a key."""
        code, text = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
            await self.call("Input.dispatchKeyEvent", **pressed, text=text if kind == "keyDown" else "")

    async def press_letter(self, letter: str) -> None:
        """Presses the key of a letter or a digit."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=letter, text=letter if kind == "keyDown" else "")

    async def choose_files(self, selector: str, paths: Sequence[Path]) -> None:
        """Chooses files in a field for files."""
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.call("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    async def picture(self) -> bytes:
        """Returns what the window shows as a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    async def window(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the window's size, and light or dark; narrow ones are phones."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def load(self, url: str) -> None:
        """Opens an address, also the one that is open."""
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)


@asynccontextmanager
async def browser_at(url: str, program: str) -> AsyncIterator[Browser]:
    """Opens a page in a browser with a profile of its own, and always ends the browser."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(program, *_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            port = await _debugging_port(process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    target = next(one for one in await answer.json(content_type=None) if one["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    browser = Browser(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await browser.call(f"{domain}.enable")
                    await browser.window(1400, 900)
                    await browser.load(url)
                    yield browser
        finally:
            process.terminate()
            await process.wait()


async def _debugging_port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(_START_S):
        async for line in process.stderr:
            if b"DevTools listening on" in line:
                return int(line.split(b":")[2].split(b"/")[0])
    raise Failed("Chromium did not start")
