"""The engine's reports of its state."""

from types import SimpleNamespace

from caraserve.core.lora_layout import ALIGN_BYTES
from caraserve.engine.stats import snapshot_of
from caraserve.telemetry.metrics import MAX_HOST_SERIES
from tests.lora.tiers import World

NO_REQUESTS = SimpleNamespace(running=(), waiting=(), loading=(), num_waiting=0)


def test_a_snapshot_counts_all_adapters_in_host_memory_and_names_the_most_recently_used() -> None:
    count = MAX_HOST_SERIES + 3
    world = World(device_bytes=40, host_bytes=count * ALIGN_BYTES)
    for index in range(count):
        world.add(f"a{index}")
        world.manager.prefetch(world.manager.pin(f"a{index}"))
        world.settle()
    world.serve("a0")
    snapshot = snapshot_of(NO_REQUESTS, world.manager, draining=False)  # type: ignore[arg-type]
    assert (snapshot.num_on_device, snapshot.device_adapters) == (1, {"a0"})
    assert snapshot.num_in_host == count
    assert snapshot.host_adapters == ("a0", *(f"a{index}" for index in range(count - 1, 3, -1)))


def test_a_snapshot_counts_an_adapter_of_two_names_once_and_names_both() -> None:
    world = World()
    world.add("a")
    world.manager.register("alias", "a", world.manager.pin("a").source, 40)
    world.serve("a")
    snapshot = snapshot_of(NO_REQUESTS, world.manager, draining=True)  # type: ignore[arg-type]
    assert (snapshot.num_on_device, snapshot.num_in_host, snapshot.draining) == (1, 1, True)
    assert snapshot.device_adapters == set(snapshot.host_adapters) == {"a", "alias"}


def test_a_snapshot_counts_loads_until_the_copy_has_ended_even_without_requests() -> None:
    """With CPU workers a request may end before its adapter has been copied."""
    world = World()
    world.add("a")
    adapter = world.ask("a")
    counts = []
    for end_one in (world.reads, world.device.copies):
        counts.append(snapshot_of(NO_REQUESTS, world.manager, draining=False).loads_under_way)  # type: ignore[arg-type]
        if end_one is world.device.copies:
            world.end(adapter)
        end_one.pop()()
    counts.append(snapshot_of(NO_REQUESTS, world.manager, draining=False).loads_under_way)  # type: ignore[arg-type]
    assert counts == [1, 1, 0]
