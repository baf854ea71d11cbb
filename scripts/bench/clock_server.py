"""Runs `caraserve` with a clock in place of the device: iterations take a given time, compute nothing, and draw tokens.

    .venv/bin/python scripts/bench/clock_server.py --decode-ms 7 --prompt-ms 3 --launch-ms 0.5 serve --port 8300

All else is the real server: HTTP, tokenizer, scheduler, engine. `--launch-ms`: what the thread that launches an
iteration works with the interpreter lock held. `--one-token`: all tokens are the same one, so that a client can tell
whether an answer is whole. `--lag`: how late the event loop's timers were is in this file at the end.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from caraserve.__main__ import run
from caraserve.core.batch import Batch, RowResult, StepResult
from caraserve.cpu.backend import CpuBackend
from caraserve.loop import Engine
from caraserve.tokenizer.tokenizer import Tokenizer

_TRIED_TOKENS, _MOST_CHARACTERS = 4000, 8
# Since version 0.2, results also say when the device had the launch.
_REPORTS_LAUNCHES = "launched_s" in StepResult.__dataclass_fields__

_LAG_STEP_S = 0.005

Done = Callable[[StepResult | Exception], None]


class Clock:
    """Executes batches one after another in a thread, by waiting. One that is launched after the end of the one before
    begins then, as on a device."""

    def __init__(self, decode_s: float, prompt_s: float, launch_s: float) -> None:
        self._decode_s, self._prompt_s, self._launch_s = decode_s, prompt_s, launch_s
        self._queued: SimpleQueue[tuple[Batch, Done]] = SimpleQueue()
        self._launched: SimpleQueue[tuple[Batch, Done, float]] = SimpleQueue()
        self._random = random.Random(1)
        self.tokens: list[int] = [0]
        for work in (self._launch, self._execute):
            threading.Thread(target=work, daemon=True).start()

    def add(self, batch: Batch, done: Done) -> None:
        """Launches a batch."""
        self._queued.put((batch, done))

    def _launch(self) -> None:
        while True:
            batch, done = self._queued.get()
            end_s = time.thread_time() + self._launch_s
            while time.thread_time() < end_s:
                pass
            self._launched.put((batch, done, time.monotonic()))

    def _execute(self) -> None:
        ended_s = 0.0
        while True:
            batch, done, launched_s = self._launched.get()
            began_s = max(ended_s, launched_s)
            has_prompt = any(row.count > 1 for row in batch.rows)
            ended_s = began_s + self._decode_s + self._prompt_s * has_prompt
            if (left_s := ended_s - time.monotonic()) > 0:
                time.sleep(left_s)
            draw = self._random.choice
            rows = tuple([RowResult((draw(self.tokens),)) if row.samples else RowResult() for row in batch.rows])
            launch = {"launched_s": launched_s} if _REPORTS_LAUNCHES else {}
            done(StepResult(rows, began_s, ended_s, **launch))


def _measure_lag(path: Path) -> None:
    """Has the engine's loop measure how late its timers are, and write the figures to a file when it ends."""
    runs = Engine.run

    async def measure() -> None:
        loop, late_ms = asyncio.get_running_loop(), array("d")
        try:
            while True:
                due_s = loop.time() + _LAG_STEP_S
                await asyncio.sleep(_LAG_STEP_S)
                late_ms.append(1000 * (loop.time() - due_s))
        finally:
            _write_shares(path, sorted(late_ms))

    async def run(engine: Engine) -> None:
        measuring = asyncio.create_task(measure())
        try:
            await runs(engine)
        finally:
            measuring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await measuring

    Engine.run = run  # type: ignore[method-assign,assignment]


def _write_shares(path: Path, ordered: list[float]) -> None:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    found = {name: round(ordered[int(share * (len(ordered) - 1))], 2) for name, share in shares.items()}
    path.write_text(json.dumps(found))


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
    parser.add_argument("--one-token", action="store_true")
    parser.add_argument("--lag", type=Path, metavar="FILE")
    args, command = parser.parse_known_args()
    if args.lag is not None:
        _measure_lag(args.lag)
    clock = Clock(args.decode_ms / 1000, args.prompt_ms / 1000, args.launch_ms / 1000)
    made = Tokenizer.__init__

    def make(tokenizer: Tokenizer, *arguments: object, **named: object) -> None:
        made(tokenizer, *arguments, **named)  # type: ignore[arg-type]
        clock.tokens = _texts(tokenizer)[: 1 if args.one_token else None]

    Tokenizer.__init__ = make  # type: ignore[method-assign,assignment]
    CpuBackend.launch = lambda self, batch, done: clock.add(batch, done)  # type: ignore[method-assign]
    sys.argv[1:] = command
    run()


if __name__ == "__main__":
    main()
