"""The watchdog's thread: looks after assisted chunks while there are any, and at once when a worker dies."""

import threading
import time
from collections.abc import Callable, Sequence

from caraserve.cpu.lora_workers.pool import Workers
from caraserve.gpu.assist.handshake import LOOK_S, Book, Life, SharedWords, Watchdog


def lives_of(workers: Workers) -> list[Life]:
    """All workers at this moment."""
    return [
        Life(index, state.incarnation or None, is_idle=not state.is_busy)
        for index, state in enumerate(workers.states())
    ]


class Guard:
    """A `Watchdog` with a thread of its own; `watch` and `forget` may be called from another."""

    def __init__(
        self, words: SharedWords, workers: Workers, lives: Callable[[Workers], Sequence[Life]] = lives_of
    ) -> None:
        self._watchdog, self._workers, self._lives = Watchdog(words), workers, lives
        self._lock = threading.Lock()
        self._needed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="caraserve-guard", daemon=True)
        self._thread.start()

    def watch(self, book: Book, expected_s: dict[int, float]) -> None:
        """A chunk is about to be launched."""
        with self._lock:
            self._watchdog.watch(book, expected_s)
        self._needed.set()

    def forget(self, book: Book) -> bool:
        """The device is done with a chunk. Returns whether it was given up."""
        with self._lock:
            return self._watchdog.forget(book)

    def close(self) -> None:
        """Ends the thread; nothing is under way any more."""
        self._closing = True
        self._needed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._needed.wait()
            self._needed.clear()
            while self._look():
                with self._workers.changed:
                    self._workers.changed.wait(LOOK_S)

    def _look(self) -> bool:
        with self._lock:
            if self._watchdog.is_needed:
                self._watchdog.look(time.monotonic(), self._lives(self._workers))
            return self._watchdog.is_needed and not self._closing
