"""What is looked at in the parts of the page with adapters and with the server's numbers."""

from collections.abc import Awaitable, Callable

from caraserve.demo import adapters_folder
from scripts.page.browser import Browser, Failed
from scripts.page.chat_stages import begin, say


async def table(page: Browser) -> None:
    """The table has all adapters, with their settings, can be filtered, and names what is not served."""
    await _open(page, "adapters")
    rows = "document.querySelectorAll('#adapters tr').length"
    await page.until(f"{rows} === 5", "the table has not five adapters")
    if not (found := await page.text("#refused")).startswith("half: ") or len(found) < 20:
        raise Failed(f"the folder that is not served: {found}")
    await page.write("#contains", "PIR")
    await page.until(f"{rows} === 1", "the filter does not filter")
    await page.write("#contains", "")
    await page.until(f"{rows} === 5", "the filter does not end")
    await page.run("document.querySelector('[aria-label=\"chef answers in the chat\"]').click()")
    if "chef×" not in await page.texts("#chosen li"):
        raise Failed("an adapter cannot be chosen in the table")
    await page.run("document.querySelector('[aria-label=\"chef answers in the chat\"]').click()")


async def settings(page: Browser) -> None:
    """An adapter's labels, pin and defaults are saved; aliases are set, rolled back and deleted."""
    await show_adapter(page, "lawyer")
    await page.write("#adapter-dialog form textarea", "stage=prod\nteam=law")
    await page.run(
        "document.querySelector('#adapter-dialog select').value = 'host';"
        "document.querySelector('#adapter-dialog input[type=number]').value = 0.5"
    )
    await _submit(page, "#adapter-parts > form", "Saved.")
    await page.until("/\"temperature\": 0.5/.test(document.querySelector('#adapter-dialog pre').textContent)", "?")
    await page.until(
        "[...document.querySelectorAll('#adapters tr')].some(row => row.lastChild.textContent ==="
        "'pinned in host, stage=prod, team=law')",
        "the settings are not in the table",
    )
    for name in ("lawyer", "poet"):
        await show_adapter(page, name)
        await page.write("#adapter-dialog form.line input", "prod")
        await _submit(page, "#adapter-dialog form.line", f"prod stands for {name}.")
    await page.click("[aria-label='Roll prod back to lawyer']")
    await page.until(_said("prod stands for lawyer again."), "the alias is not rolled back")
    await page.press("Escape")
    await begin(page, "prod")
    status = (await say(page, "Tell me about the sea."))[0]["status"]
    if not status.startswith("lawyer, from "):
        raise Failed(f"an alias answers as {status}")
    await show_adapter(page, "lawyer")
    await page.click("[aria-label='Delete the alias prod']")
    await page.until(_said("The alias prod is deleted."), "the alias is not deleted")
    await page.press("Escape")


async def upload(page: Browser) -> None:
    """A folder is uploaded with its version shown, not over another one unless that is asked for, and deleted."""
    await _open(page, "adapters")
    files = [adapters_folder() / "json" / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    await page.choose_files("#upload-files", files[:1])
    missing = "adapter_model.safetensors is not among the 1 files"
    await page.until(f"document.querySelector('#upload-said').textContent === '{missing}'", "half a folder is taken")
    await page.choose_files("#upload-folder", [adapters_folder() / "json"])
    named = "document.querySelector('#upload-name').value === 'json'"
    await page.until(f"{named} && document.querySelectorAll('#upload-chosen li').length === 2", "no folder is taken")
    await page.choose_files("#upload-files", files)
    await page.write("#upload-name", "my-adapter")
    await page.run("document.querySelector('#upload-send').click()")
    await page.until(_said("", "#upload-said", "my-adapter is served. Its version is "), "the upload does not end")
    await page.until("document.querySelector('#adapter-title').textContent === 'my-adapter'", "it is not shown")
    await page.until("document.querySelector('#adapter-dialog .digest')", "its version is not shown")
    await page.press("Escape")
    await page.run("document.querySelector('#upload-send').click()")
    await page.until(_said("", "#upload-said", "There is an adapter my-adapter"), "an adapter is replaced unasked")
    page.forget("status of 412")
    await page.run("document.querySelector('#upload-replace').click(); document.querySelector('#upload-send').click()")
    await page.until(_said("", "#upload-said", "my-adapter is served"), "an adapter cannot be replaced")
    await page.until("document.querySelector('#adapter-dialog .digest')", "its version is not shown")
    await page.run("[...document.querySelectorAll('#adapter-parts button')].at(-1).click()")
    await page.run("document.querySelector('#adapter-parts .danger').click()")
    await page.until("!document.querySelector('#adapter-dialog').open", "the adapter is not deleted")
    await page.until("document.querySelectorAll('#adapters tr').length === 5", "a deleted adapter is in the table")


async def numbers(page: Browser) -> None:
    """The server's part has its numbers, the timeline in words, who has used what, and the metrics."""
    await _open(page, "server")
    await page.until("/pirate: \\d+ prefill/.test(document.querySelector('#timeline').ariaLabel)", "no timeline")
    await page.until("/^\\d/.test(document.querySelector('#rate').textContent)", "no tokens a second")
    await page.until("document.querySelectorAll('#usage tr').length >= 2", "no usage")
    await page.click("#metrics")
    await page.until("/vllm:num_requests_running/.test(document.querySelector('#text').textContent)", "no metrics")
    await page.press("Escape")


async def no_sideways_scroll(page: Browser) -> None:
    """No part is wider than a phone."""
    for name in ("chat", "adapters", "server"):
        await _open(page, name)
        wide = await page.run("document.documentElement.scrollWidth - innerWidth")
        if wide > 0:
            raise Failed(f"on a phone, {name} is {wide} pixels too wide")


async def gone(page: Browser) -> None:
    """When the server does not answer, its numbers are marked as old, and a prompt says why it has no answer."""
    await page.until(
        "/^the server is not reachable; the numbers are from /.test(document.querySelector('#state').textContent)", "?"
    )
    await _open(page, "chat")
    await page.write("#prompt", "Are you there?")
    await page.press("Enter")
    await page.until(
        "document.querySelector('.turn:last-child p.bad')?.textContent === 'the server is not reachable'", "?"
    )
    page.forget("ERR_CONNECTION_REFUSED")


async def _open(page: Browser, name: str) -> None:
    await page.run(f"document.querySelector('#tab-{name}').click()")


async def show_adapter(page: Browser, name: str) -> None:
    """Opens the dialog of an adapter."""
    await _open(page, "adapters")
    button = f"[...document.querySelectorAll('#adapters button')].find(one => one.textContent === '{name}')"
    await page.until(button + " !== undefined", f"{name} is not in the table")
    await page.run(f"document.querySelector('#adapter-dialog').close(); {button}.click()")
    await page.until("document.querySelector('#adapter-dialog .digest')", f"the dialog of {name} does not open")


async def _submit(page: Browser, form: str, said: str) -> None:
    await page.run(f"document.querySelector('{form}').requestSubmit()")
    await page.until(_said(said), f"the dialog does not say: {said}")


def _said(text: str, selector: str = "#adapter-said", begin: str = "") -> str:
    """The expression for a line that is, or begins with, a text."""
    line = f"document.querySelector('{selector}').textContent"
    return f"{line}.startsWith('{begin}')" if begin else f"{line} === '{text}'"


async def _show_chat(page: Browser) -> None:
    await _open(page, "chat")


async def _show_settings(page: Browser) -> None:
    await _open(page, "chat")
    if await page.run("document.querySelector('#settings').hidden"):
        await page.run("document.querySelector('#show-settings').click()")


async def _show_picker(page: Browser) -> None:
    await page.run(
        "if (!document.querySelector('#picker').checkVisibility()) document.querySelector('#show-settings').click()"
    )
    await page.run("document.querySelector('#picker').focus()")
    await page.press("ArrowDown")
    await page.until("!document.querySelector('#options').hidden", "the picker does not open")


async def _show_adapters(page: Browser) -> None:
    await _open(page, "adapters")
    await page.until("document.querySelector('#adapters tr')", "the table is empty")


async def _show_dialog(page: Browser) -> None:
    await show_adapter(page, "pirate")


async def _show_server(page: Browser) -> None:
    await _open(page, "server")


# What accessibility is checked of; Escape ends dialogs and lists.
SHOWN: dict[str, Callable[[Browser], Awaitable[None]]] = {
    "chat": _show_chat,
    "settings": _show_settings,
    "picker": _show_picker,
    "adapters": _show_adapters,
    "the dialog of an adapter": _show_dialog,
    "server": _show_server,
}
