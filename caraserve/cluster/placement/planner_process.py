"""Makes a plan in a process of its own, because planning computes for seconds and would block the event loop.

    python -m caraserve.cluster.placement.planner_process < question > plan

`ask` starts the process. Errors go to standard error.
"""

import asyncio
import os
import sys

import msgspec

from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, Server, decoded, encoded
from caraserve.cluster.routing.placement_plan import PlacementPlan

_NICE = 10


class Question(msgspec.Struct, frozen=True):
    """What a plan is made for, without the previous plan."""

    routing: str
    epoch: int
    adapters: list[AdapterDemand]
    servers: list[Server]
    points: dict[int, float]  # rank → tokens/s of one server
    padded: bool  # whether the largest rank in a batch slows down the other requests in it

    def answer(self, previous: PlacementPlan | None) -> PlacementPlan | None:
        """Makes the plan, or returns None if the routing needs none."""
        return make_plan(
            self.routing, self.adapters, self.servers, self.points, self.epoch, previous, padded=self.padded
        )


async def ask(body: bytes, previous: bytes, timeout_s: float) -> bytes:
    """Runs the process and returns the encoded plan; empty if none is needed. `body`: a Question as JSON. `previous`:
    the plan before it, or empty. Raises TimeoutError, and OSError with the end of what the process wrote to stderr."""
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
    question = msgspec.json.decode(given[8:end], type=Question)
    plan = question.answer(decoded(given[end:]) if given[end:] else None)
    sys.stdout.buffer.write(encoded(plan) if plan is not None else b"")


if __name__ == "__main__":
    main()
