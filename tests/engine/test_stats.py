"""The engine's reports of its state."""

from types import SimpleNamespace

from caraserve.core.lora_layout import ALIGN_BYTES
from caraserve.engine.stats import snapshot_of
from caraserve.telemetry.metrics import MAX_HOST_SERIES
from tests.lora.tiers import CacheTiers

NO_REQUESTS = SimpleNamespace(running=(), waiting=(), loading=(), num_waiting=0)


def test_a_snapshot_counts_all_adapters_in_host_memory_and_names_the_most_recently_used() -> None:
    count = MAX_HOST_SERIES + 3
    tiers = CacheTiers(device_bytes=40, host_bytes=count * ALIGN_BYTES)
    for index in range(count):
        tiers.add(f"a{index}")
        tiers.manager.prefetch(tiers.manager.pin(f"a{index}"))
        tiers.settle()
    tiers.serve("a0")
    snapshot = snapshot_of(NO_REQUESTS, tiers.manager, draining=False)  # type: ignore[arg-type]
    assert (snapshot.num_on_device, snapshot.device_adapters) == (1, {"a0"})
    assert snapshot.num_in_host == count
    assert snapshot.host_adapters == ("a0", *(f"a{index}" for index in range(count - 1, 3, -1)))


def test_a_snapshot_counts_an_adapter_of_two_names_once_and_names_both() -> None:
    tiers = CacheTiers()
    tiers.add("a")
    tiers.manager.register("alias", "a", tiers.manager.pin("a").source, 40)
    tiers.serve("a")
    snapshot = snapshot_of(NO_REQUESTS, tiers.manager, draining=True)  # type: ignore[arg-type]
    assert (snapshot.num_on_device, snapshot.num_in_host, snapshot.draining) == (1, 1, True)
    assert snapshot.device_adapters == set(snapshot.host_adapters) == {"a", "alias"}


def test_a_snapshot_counts_loads_until_the_copy_has_ended_even_without_requests() -> None:
    """With CPU workers a request may end before its adapter has been copied."""
    tiers = CacheTiers()
    tiers.add("a")
    adapter = tiers.ask("a")
    counts = []
    for end_one in (tiers.reads, tiers.device.copies):
        counts.append(snapshot_of(NO_REQUESTS, tiers.manager, draining=False).loads_under_way)  # type: ignore[arg-type]
        if end_one is tiers.device.copies:
            tiers.end(adapter)
        end_one.pop()()
    counts.append(snapshot_of(NO_REQUESTS, tiers.manager, draining=False).loads_under_way)  # type: ignore[arg-type]
    assert counts == [1, 1, 0]
