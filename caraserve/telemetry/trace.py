"""A Chrome trace of loads, iterations, layers and CPU workers, which Perfetto opens.

Events are written as they come. The format allows the closing bracket to be missing, so the trace of a server that
crashed is readable.
"""

import json
import threading
from pathlib import Path
from typing import Any, Literal, TextIO

from caraserve.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raises ConfigError when a trace cannot be written to `path`. Makes an empty file if there is none."""
    _opened(path, "a").close()


def _opened(path: Path, mode: Literal["w", "a"]) -> TextIO:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {str(path)!r} cannot be written: {error.strerror}") from None


class Trace:
    """Appends spans to a file. Thread-safe. A track is a row of the picture; times are of the monotonic clock."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be written."""
        self._lock = threading.Lock()
        self._tracks: dict[str, int] = {}
        self._file = _opened(path, "w")
        self._file.write("[\n")
        self._write({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "caraserve"}})

    def span(self, track: str, name: str, start_ns: int, end_ns: int, **details: Any) -> None:
        """Writes a span from `start_ns` to `end_ns`, with `details` as its arguments."""
        with self._lock:
            if self._file.closed:
                return
            thread = self._tracks.get(track)
            if thread is None:
                thread = self._tracks[track] = len(self._tracks) + 1
                self._write({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": track}})
            event = {"ph": "X", "pid": 1, "tid": thread, "name": name}
            self._write(event | {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "args": details})

    def close(self) -> None:
        """Writes the end of the trace and closes the file."""
        with self._lock:
            self._file.write("{}]\n")
            self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + ",\n")
