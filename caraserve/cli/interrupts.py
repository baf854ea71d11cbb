"""Ctrl-C while a command starts: it ends at once, whatever is being imported, compiled or measured.

Python tells the main thread of a signal between two of its steps, which may be seconds away while a kernel is compiled,
and raises in the middle of other packages' work. So a thread of its own waits for the signal, which is blocked in all
others, and ends the process. Nothing is lost by that: CPU LoRA workers end with the process, shared memory has no name,
and files are replaced whole.
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
    """Ctrl-C ends the process at once, until the release is called or the context is left."""
    release = Release()
    try:
        yield release
    finally:
        release()


class Release:
    """Gives Ctrl-C back to the handlers that Python knows of. Idempotent; for the main thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = threading.Thread(target=_wait, name="caraserve-interrupt", daemon=True)
        # Threads and processes that start from here on do not get the signal either: they end with this process.
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
        os.write(
            2, (b"\r\x1b[K\x1b[?25h" if os.isatty(2) else b"") + b"caraserve: interrupted\n"
        )  # a bar hides the cursor
        os._exit(EXIT_CODE)
