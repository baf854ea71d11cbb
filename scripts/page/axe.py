"""axe-core, which looks for what keeps people with a screen reader or a keyboard out. It comes from npm, once."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from scripts.page.browser import Browser, Failed

_VERSION = "4.14.1"
_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
_FETCH_S = 20.0


def source() -> str | None:
    """Returns the program; None if it is not there and npm cannot fetch it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "caraserve" / f"axe-core-{_VERSION}.js"
    if not cache.exists() and not _fetch(cache):
        return None
    program = cache.read_bytes()
    if hashlib.sha256(program).hexdigest() != _SHA256:
        raise Failed(f"{cache} is not axe-core {_VERSION}; delete it")
    return program.decode()


def _fetch(cache: Path) -> bool:
    if (npm := shutil.which("npm")) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"axe-core@{_VERSION}", "--silent"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=_FETCH_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        archive = Path(folder) / f"axe-core-{_VERSION}.tgz"
        if done.returncode != 0 or not archive.exists():
            return False
        with tarfile.open(archive) as files:
            member = files.extractfile("package/axe.min.js")
            assert member is not None
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_bytes(member.read())
    return True


async def check(page: Browser, program: str, where: str) -> None:
    """Raises Failed, which names the first rule that what is shown breaks."""
    await page.run(f"window.axe ? 0 : (() => {{ {program} }})()")
    found = json.loads(
        await page.run(
            "axe.run(document, { resultTypes: ['violations'], preload: false })"
            ".then(({ violations }) => JSON.stringify(violations.map("
            "({ id, help, nodes }) => [id, help, nodes.map(one => one.html.slice(0, 200))])))"
        )
    )
    if found:
        raise Failed(f"{where}: " + "; ".join(f"{rule} ({text}): {nodes[:3]}" for rule, text, nodes in found))
