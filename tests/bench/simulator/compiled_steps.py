"""Compiled code by which tests act on a simulated fleet: decisions of a router, and what it sees."""

from typing import Any

from numba import typeof

from caraserve.bench.simulator import routing, views
from caraserve.bench.simulator.compiled import entry

DECIDE, CHOOSE_NEXT, REFUSES = range(3)
SEND, BEAT, LOOK = range(3)


@entry
def route(fleet, action, now, rng):  # type: ignore[no-untyped-def]
    if action == CHOOSE_NEXT:
        return routing.choose_next(fleet, 0, now, rng)
    if action == REFUSES:
        return routing.refuses(fleet, 0)
    fleet.routes[0].attempts = 0
    waits = routing.propose(fleet, 0, now, rng) > now
    fleet.routes[0].target = fleet.orders[0, 0]
    routing.expand(fleet, 0, rng)
    return waits


@entry
def see(fleet, step, router, number, now):  # type: ignore[no-untyped-def]
    if step == SEND:
        views.add_sent(fleet, number, fleet.routes[0], now)
    elif step == BEAT:
        views.publish(fleet, number, now)
    else:
        views.arrive(fleet, now)
        views.look(fleet, router, now)


def compile_steps(fleet: Any, rng: Any) -> None:
    """Compiles both for fleets like this one and runs neither. In a process that has just compiled the simulator, this
    takes 9 s, and 25 s in others."""
    for function, arguments in ((route, (fleet, 0, 0, rng)), (see, (fleet, 0, 0, 0, 0))):
        function.compile(tuple(map(typeof, arguments)))
