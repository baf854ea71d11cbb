"""Makes a plan in a process of its own, because planning computes for seconds and would block the event loop.

    python -m caraserve.cluster.placement.planner_process < question > plan

`ask` starts the process. Errors go to standard error.
"""

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping

from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, Server, decoded, encoded, packed, unpacked
from caraserve.cluster.routing.placement_plan import PlacementPlan

_NICE = 10


def question(
    routing: str,
    epoch: int,
    adapters: Iterable[AdapterDemand],
    servers: Iterable[Server],
    points: Mapping[int, float],
    *,
    padded: bool,
) -> bytes:
    """Encodes the input of a plan, without the previous plan."""
    return packed(
        {
            "routing": routing,
            "epoch": epoch,
            "adapters": [(one.name, one.rank, one.num_bytes, one.tokens_per_s) for one in adapters],
            "servers": [(one.name, one.capacity_bytes, one.speed) for one in servers],
            "points": list(points.items()),
            "padded": padded,
        }
    )


def answer(body: bytes, previous: PlacementPlan | None) -> PlacementPlan | None:
    """Makes the plan for an encoded question, or returns None if the routing needs none."""
    asked = unpacked(body)
    adapters = [AdapterDemand(*fields) for fields in asked["adapters"]]
    servers = [Server(*fields) for fields in asked["servers"]]
    points = {rank: rate for rank, rate in asked["points"]}  # noqa: C416 -- lists, not pairs
    return make_plan(asked["routing"], adapters, servers, points, asked["epoch"], previous, asked["padded"])


async def ask(body: bytes, previous: bytes, timeout_s: float) -> bytes:
    """Runs the process and returns the encoded plan; empty if none is needed. `previous`: the encoded previous plan,
    or empty. Raises TimeoutError, and OSError with the end of the process's standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # a terminal's signals, for which this process drains, must not reach it
    )
    try:
        async with asyncio.timeout(timeout_s):
            plan, said = await process.communicate(len(body).to_bytes(8) + body + previous)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise OSError(f"the process that makes plans ended with {process.returncode}: {said.decode()[-500:]}")
    return plan


def main() -> None:
    """Reads a question and the previous plan from standard input, and writes the plan to standard output."""
    os.nice(_NICE)
    given = sys.stdin.buffer.read()
    end = 8 + int.from_bytes(given[:8])
    plan = answer(given[8:end], decoded(given[end:]) if given[end:] else None)
    sys.stdout.buffer.write(encoded(plan) if plan is not None else b"")


if __name__ == "__main__":
    main()
