"""Tests of this folder may be coroutines; each gets an event loop of its own and a bound on its time."""

import asyncio
import inspect

import pytest

TIMEOUT_S = 120.0  # what takes this long hangs, on a machine with much else to do, too


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(_bounded(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True


async def _bounded(test: "asyncio.Future[None]") -> None:
    """Runs the test; an exception that nobody awaited fails it too."""
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with asyncio.timeout(TIMEOUT_S):
        await test
    assert not failures
