"""The web page in a browser: scripts/page_check goes through it as a person would."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.page.browser import program

ROOT = Path(__file__).parent.parent


def test_the_page_works_in_a_browser() -> None:
    if program() is None:
        pytest.skip("Chromium is not installed, so the web page is not used")
    command = [sys.executable, str(ROOT / "scripts" / "page_check")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("page_check: the page works\n")
