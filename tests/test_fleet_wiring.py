"""How a server's parts are put together when it is one of several."""

import argparse
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.cluster.seal import Keyring
from caraserve.config import ClusterConfig
from caraserve.fleet import Admission, make_dispatch
from tests.cluster.nodes import instances


@pytest.mark.parametrize(
    ("draining", "failure", "reason"), [(False, None, None), (True, None, "draining"), (False, "gone", "draining")]
)
def test_whoever_stops_or_cannot_go_on_takes_nothing_from_others(
    tmp_path: Path, draining: bool, failure: str | None, reason: str | None
) -> None:
    parser = argparse.ArgumentParser()
    ClusterConfig.add_arguments(parser)
    config = ClusterConfig.from_args(parser.parse_args(["--peers", "127.0.0.1:1"]))
    catalog = SimpleNamespace(find=lambda name: None)
    engine: Any = SimpleNamespace(draining=draining, failure=failure, catalog=catalog)

    async def body() -> str | None:
        async with asyncio.timeout(20), instances(tmp_path) as running:
            node = (await running.start("a")).node
            dispatch = make_dispatch(node, engine, config, Admission(Keyring((b"a secret of the tests",)), None, None))
            try:
                refusal = dispatch.forwarding.refusal(dispatch.forwarding.arrival(None, 10, 10), insists=True)
                return refusal.reason if refusal else None
            finally:
                await dispatch.relays.close()

    assert asyncio.run(body()) == reason
