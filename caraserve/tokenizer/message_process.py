"""Processes for what clients and admins write and nothing could stop from within: they are killed instead."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Self

from caraserve.tokenizer.child_process import LENGTH_BYTES, MAX_ANSWER_BYTES

_START_S = 60.0  # the one that compiles grammars reads the tokenizer, 1.2 s for 128,000 tokens


class MessageProcess:
    """A Python process that answers messages and ends with its input, so with this one; see `child_process.py`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_busy = False  # a message was not answered: the process is not used again

    @classmethod
    async def start(cls, module: str, first: bytes) -> Self:
        """Starts a module as a process, and waits until it has answered its first message."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # a terminal's signals, for which this process drains, must not reach it
        )
        started = cls(process)
        try:
            await started.ask(first, _START_S)
        except BaseException:
            await started.close()
            raise
        return started

    @property
    def is_usable(self) -> bool:
        """Whether it waits for a message."""
        return self._process.returncode is None and not self._is_busy

    async def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Returns the answer. Kills the process otherwise, and raises TimeoutError, also where `limit_cpu` ended the
        process, or ConnectionError if it died otherwise."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._is_busy = True
        try:
            stdin.write(len(message).to_bytes(LENGTH_BYTES))
            stdin.write(message)
            async with asyncio.timeout(timeout_s):
                await stdin.drain()
                size = int.from_bytes(await stdout.readexactly(LENGTH_BYTES))
                if size > MAX_ANSWER_BYTES:
                    raise ConnectionError(f"an answer has {size} bytes")
                answer = await stdout.readexactly(size)
            self._is_busy = False
        except EOFError:
            if await self._process.wait() == -signal.SIGPROF:
                raise TimeoutError from None
            raise ConnectionError("the process has died") from None
        finally:
            if self._is_busy:
                self._kill()
        return answer

    async def close(self) -> None:
        """Ends the process."""
        self._kill()
        await self._process.wait()

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
