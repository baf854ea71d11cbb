"""Ctrl-C during the start of a command: ends the process at once, also during imports, compilation or measurements.

Python runs signal handlers in the main thread between two bytecodes, which may be seconds apart while a kernel is
compiled, and raises in the middle of other packages' work. So a separate thread waits for the signal, which is blocked
in all others, and ends the process. Nothing is lost: CPU LoRA workers end with the process, shared memory has no name,
and files are replaced as a whole.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

EXIT_CODE = 128 + signal.SIGINT
_RELEASE = signal.SIGUSR1  # ends the waiting thread; sent to that thread alone


@contextlib.contextmanager
def ending_at_once() -> Iterator["Release"]:
    """Makes Ctrl-C end the process at once, until the yielded release is called or the context ends."""
    release = Release()
    try:
        yield release
    finally:
        release()


class Release:
    """Returns Ctrl-C to Python's signal handlers when called. Idempotent; for the main thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = threading.Thread(target=_wait, name="caraserve-interrupt", daemon=True)
        # Threads and processes that start later inherit the mask; they end with this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, _RELEASE})
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {_RELEASE})

    def __call__(self) -> None:
        if self._thread is None:
            return
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, _RELEASE)
        self._thread.join()
        self._thread = None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _wait() -> None:
    if signal.sigwait({signal.SIGINT, _RELEASE}) == signal.SIGINT:
        show_cursor = b"\r\x1b[K\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides it
        os.write(2, show_cursor + b"caraserve: interrupted\n")
        os._exit(EXIT_CODE)
