"""Tests may be coroutines, each with an event loop and a bound on its time; every test leaves the log as it was."""

import asyncio
import atexit
import gc
import inspect
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import hypothesis
import pytest

from tests.compiled_first import compile_all

# The same examples in every run: a change is not blamed for what another one broke, and no example has a time limit
# that a busy machine exceeds. `--hypothesis-profile random` looks for new ones, and for more.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("fixed")

# Read by torch as it is imported. Its threads spin while they wait for one another, and the oracle's matrices are tiny:
# on two cores with two test processes, the same tests took three times as long with two threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Servers of the demo that tests start keep uploaded adapters there, not in the user's own folder.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="caraserve-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)

# A shell ignores SIGINT for what it starts in the background, and processes that tests interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


gc.disable()  # until all tests are collected: what is imported stays, and is searched for garbage for seconds


def pytest_collection_finish() -> None:
    """Leaves a million objects of imported modules and of the collected tests out of all later garbage collections. No
    test may unfreeze them: each collection would take half a second."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Lets each of xdist's processes compile another part of what many tests need, and have the rest from the cache."""
    if hasattr(config, "workerinput"):
        compile_all(int(config.workerinput["workerid"].removeprefix("gw")))


TIMEOUT_S = 240.0  # what takes this long hangs, on a busy machine too; `pass_time` counts, by up to 2 minutes


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Restores the log's settings, which commands that run in this process change and other tests rely on."""
    log = logging.getLogger("caraserve")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(_bounded(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names}))
    return True


async def _bounded(test: Callable[..., Awaitable[None]], given: dict[str, Any]) -> None:
    """Runs the test; an exception in a task that was never awaited fails it too. Of a fixture that is an asynchronous
    context manager, the test gets what that yields."""
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        for name, value in given.items():
            if isinstance(value, AbstractAsyncContextManager):
                given[name] = await stack.enter_async_context(value)
        await test(**given)
    assert not failures


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Puts the event loop's clock forward by so many seconds; callbacks that are due then run at its next turn."""

    def forward(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + seconds)

    return forward
