"""What a benchmark writes to stdout: tables, and its report as JSON for programs."""

import json
import sys
from collections.abc import Mapping

from rich.console import Console

_WIDTH = 200  # of tables in a file or a pipe


def open_console() -> Console:
    """Returns a console as wide as the terminal; in a file or a pipe, lines are not wrapped."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, soft_wrap=True, highlight=False, markup=False)


def write_document(document: Mapping[str, object], asked: bool) -> None:
    """Writes a report as one line of JSON if it was asked for (`--json`), or if stdout is not a terminal."""
    if asked or not sys.stdout.isatty():
        sys.stdout.write(json.dumps(document) + "\n")
