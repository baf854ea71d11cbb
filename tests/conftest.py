"""Tests may be coroutines, each with an event loop and a bound on its time; every test leaves the log as it was."""

import asyncio
import inspect
import logging
from collections.abc import Iterator

import pytest

TIMEOUT_S = 120.0  # what takes this long hangs, on a machine with much else to do, too


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
    asyncio.run(_bounded(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True


async def _bounded(test: "asyncio.Future[None]") -> None:
    """Runs the test; an exception in a task that was never awaited fails it too."""
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with asyncio.timeout(TIMEOUT_S):
        await test
    assert not failures
