"""Runs `caraserve` with a clock in place of the device: iterations take a given time, compute nothing, and draw tokens.

    .venv/bin/python scripts/bench/clock_server.py --decode-ms 7 --prompt-ms 3 --launch-ms 0.5 serve --port 8300

All else is the real server: HTTP, tokenizer, scheduler, engine. `--launch-ms`: what the thread that launches an
iteration works with the interpreter lock held.
"""

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from caraserve.__main__ import run
from caraserve.core.batch import Batch, RowResult, StepResult
from caraserve.cpu.backend import CpuBackend
from caraserve.tokenizer.tokenizer import Tokenizer

_TRIED_TOKENS, _MOST_CHARACTERS = 4000, 8
_SPUN_S = 0.0003  # sleep ends late by some tenths of a millisecond
_FOLLOWS_S = 0.0002  # an iteration launched before, or so soon after the one before it ended, begins at that end


class Clock:
    """Executes batches one after another in a thread, by waiting."""

    def __init__(self, decode_s: float, prompt_s: float, launch_s: float) -> None:
        self._decode_s, self._prompt_s, self._launch_s = decode_s, prompt_s, launch_s
        self._launched: SimpleQueue[tuple[Batch, Callable[[StepResult | Exception], None]]] = SimpleQueue()
        self._begun: SimpleQueue[tuple[Batch, Callable[[StepResult | Exception], None]]] = SimpleQueue()
        self._random = random.Random(1)
        self.tokens: list[int] = [0]
        for work in (self._launch, self._execute):
            threading.Thread(target=work, daemon=True).start()

    def add(self, batch: Batch, done: Callable[[StepResult | Exception], None]) -> None:
        """Launches a batch."""
        self._launched.put((batch, done))

    def _launch(self) -> None:
        while True:
            entry = self._launched.get()
            end_s = time.thread_time() + self._launch_s
            while time.thread_time() < end_s:
                pass
            self._begun.put(entry)

    def _execute(self) -> None:
        ended_s = time.monotonic()
        while True:
            batch, done = self._begun.get()
            now_s = time.monotonic()
            began_s = ended_s if now_s - ended_s < _FOLLOWS_S else now_s
            has_prompt = any(row.count > 1 for row in batch.rows)
            end_s = began_s + self._decode_s + self._prompt_s * has_prompt
            while (left_s := end_s - time.monotonic()) > 0:
                time.sleep(max(0.0, left_s - _SPUN_S))
            ended_s = max(end_s, now_s)
            draw = self._random.choice
            rows = tuple([RowResult((draw(self.tokens),)) if row.samples else RowResult() for row in batch.rows])
            done(StepResult(rows, began_s, ended_s))


def _texts(tokenizer: Tokenizer) -> list[int]:
    """Returns tokens that are short ASCII texts."""
    texts = {token: tokenizer.decode([token]) for token in range(min(_TRIED_TOKENS, tokenizer.vocab_size))}
    return [token for token, text in texts.items() if text.isascii() and text.strip() and len(text) < _MOST_CHARACTERS]


def main() -> None:
    """Replaces the CPU's launches, and runs the command that follows the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode-ms", type=float, default=0.0, help="of an iteration (default %(default)s)")
    parser.add_argument("--prompt-ms", type=float, default=0.0, help="more, with a prompt (default %(default)s)")
    parser.add_argument("--launch-ms", type=float, default=0.0, help="of each launch (default %(default)s)")
    args, command = parser.parse_known_args()
    clock = Clock(args.decode_ms / 1000, args.prompt_ms / 1000, args.launch_ms / 1000)
    made = Tokenizer.__init__

    def make(tokenizer: Tokenizer, *arguments: object, **named: object) -> None:
        made(tokenizer, *arguments, **named)  # type: ignore[arg-type]
        clock.tokens = _texts(tokenizer)

    Tokenizer.__init__ = make  # type: ignore[method-assign,assignment]
    CpuBackend.launch = lambda self, batch, done: clock.add(batch, done)  # type: ignore[method-assign]
    sys.argv[1:] = command
    run()


if __name__ == "__main__":
    main()
