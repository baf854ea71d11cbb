"""Under any views of the cluster, a request is forwarded once at most and answered once."""

import asyncio
import contextlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caraserve.cluster.routing.cost import Backlog, LinkSpeeds
from caraserve.cluster.routing.router import Instance
from caraserve.cluster.routing.selector import LatencyTargets
from caraserve.cluster.state.replicated_map import Tier
from caraserve.config import ROUTINGS
from caraserve.errors import Overloaded
from tests.http.fake_engine import FakeAdapter, FakeEngine
from tests.http.fleet import MODEL, Fleet, fleet

NAMES = ("a", "b", "c", "d")  # d is believed in and does not exist


@st.composite
def views(draw: st.DrawFn) -> tuple[Instance, ...]:
    """Generates an instance's view: any instance, even itself, may be missing, loaded, or unable to answer."""
    seen = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return tuple(
        Instance(
            name,
            MODEL,
            Backlog(
                requests=draw(st.integers(0, 80)),
                rank_sum=8 * draw(st.integers(0, 80)),
                rank_max=8,
                queue_room=draw(st.sampled_from([0.0, 1.0, 100.0])),
            ),
            LinkSpeeds(fetch_latency_ms=draw(st.sampled_from([0.0, 50.0]))),
            draw(st.booleans()),
        )
        for name in seen
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    routing=st.sampled_from(ROUTINGS),
    believed=st.lists(views(), min_size=3, max_size=3),
    held=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(list(Tier))),
    full=st.sets(st.sampled_from(NAMES)),
    draining=st.sets(st.sampled_from(NAMES)),
    entry=st.sampled_from("abc"),
    model=st.sampled_from(["org/base", "poet"]),
)
def test_one_hop_under_any_views(
    routing: str,
    believed: list[tuple[Instance, ...]],
    held: dict[str, Tier],
    full: set[str],
    draining: set[str],
    entry: str,
    model: str,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(10), fleet(routing=routing, slo=LatencyTargets(tpot_ms=10.0)) as running:
            await start(running, full)
            running.add_absent("d")
            running.world.held["p"] = held
            for name, seen in zip("abc", believed, strict=True):
                running[name].view.stale = seen
                running[name].engine.draining = name in draining
            answer = await running[entry].client.complete(model=model)
            served = sum(len(server.engine.requests) for server in running.servers.values())
            assert answer.status in (200, 429, 503)
            assert served == (answer.status == 200)
            assert all(not server.forwards for name, server in running.servers.items() if name != entry)
            assert len(running[entry].forwards) <= 7

    asyncio.run(run())


async def start(running: Fleet, full: set[str]) -> None:
    for name in "abc":
        refusals: dict[int, Exception] = {0: Overloaded("full", retry_after_s=1)} if name in full else {}
        engine = FakeEngine(refusals=refusals, loaded={"poet": FakeAdapter("poet", "/poet", digest="p")})
        await running.start(name, engine)
    with contextlib.suppress(KeyError):
        del running.world.held["d"]
