"""Tests of the cluster's members and adapters as JSON: complete, in order, without blocking the event loop."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress

import pytest

from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter, Tier
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, serving


class Cluster:
    """A cluster with so many adapters, each on one instance.

    It counts how often the next adapter and holders are requested without a pause in between.
    """

    name = "a"
    registry_version = 1

    def __init__(self, count: int) -> None:
        self._count = count
        self.asked = self.most_asked = 0

    def pause(self) -> None:
        self.most_asked, self.asked = max(self.most_asked, self.asked), 0

    def members(self) -> tuple[MemberRecord, ...]:
        return ()

    def load(self, name: str) -> tuple[InstanceLoad, float] | None:
        return None

    def adapters(self) -> Iterator[RegisteredAdapter]:
        for index in reversed(range(self._count)):
            self.asked += 1
            yield RegisteredAdapter(f"adapter-{index}", f"digest-{index}", 8, 100)

    def adapter(self, name: str) -> RegisteredAdapter | None:
        return None

    def uploads(self, name: str) -> dict[str, RegisteredAdapter]:
        return {}

    def holders(self, digest: str) -> Mapping[str, Tier]:
        self.asked += 1
        return {"b": Tier.HOST}

    def remove(self, name: str) -> None:
        raise AssertionError("nothing is removed by looking")


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 5000])
async def test_all_adapters_are_listed_by_name_with_their_holders(count: int) -> None:
    async with serving(FakeEngine(), cluster=Cluster(count)) as client:
        answer = await client.get("/v1/cluster/adapters")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    listed = answer.json
    assert listed["object"] == "list"
    assert [one["name"] for one in listed["data"]] == sorted(f"adapter-{index}" for index in range(count))
    for one in listed["data"]:
        digest = one["name"].replace("adapter", "digest")
        assert one == {"name": one["name"], "digest": digest, "rank": 8, "num_bytes": 100, "holders": {"b": "host"}}


async def test_a_server_without_peers_lists_no_instances(client: Client) -> None:
    assert (await client.get("/v1/cluster/adapters")).json == {"object": "list", "data": []}


async def test_listing_many_adapters_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.util.tasks._TURN_S", 0.0)
    cluster = Cluster(5000)

    async def take_turns() -> None:
        while True:
            cluster.pause()
            await asyncio.sleep(0)

    async with serving(FakeEngine(), cluster=cluster) as client:
        turns = asyncio.create_task(take_turns())
        await client.get("/v1/cluster/adapters")
        turns.cancel()
        with suppress(asyncio.CancelledError):
            await turns
    assert 0 < cluster.most_asked <= 100
