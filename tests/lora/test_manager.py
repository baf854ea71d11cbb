"""The tiers of adapters: which changes exist, which adapter is evicted, and that none in use ever is."""

import itertools
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from caraserve.core.lora_layout import ALIGN_BYTES
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter import TIER_CHANGES, Adapter, AdapterTier, RemoteSource
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.device_loader import MAX_BYPASSES
from tests.lora.tiers import World


def test_only_the_listed_transitions_are_allowed() -> None:
    for start, end in itertools.product(AdapterTier, AdapterTier):
        version = Adapter("digest", AdapterFolder(Path()), 40)
        version.tier = start
        if end in TIER_CHANGES[start]:
            version.move_to(end)
            assert version.tier is end
        else:
            with pytest.raises(AssertionError):
                version.move_to(end)


def test_a_request_brings_its_adapter_to_the_device_and_the_next_finds_it_there() -> None:
    world = World()
    world.add("a")
    world.serve("a")
    world.serve("a")
    assert world.manager.counters.disk_reads == 1
    assert world.manager.counters.device_hits == 1


def test_metrics_count_hits_misses_and_evictions_of_both_caches() -> None:
    world = World(device_bytes=100)
    for name in "abc":
        world.add(name)
    for name in "aabca":
        world.serve(name)
    text = "".join(world.manager.counters.families('engine="0"'))
    counts = {
        (sample.name, sample.labels["tier"]): sample.value
        for found in text_string_to_metric_families(text)
        for sample in found.samples
    }
    assert counts == {
        ("caraserve:adapter_cache_hits_total", "device"): 2,
        ("caraserve:adapter_cache_hits_total", "host"): 0,
        ("caraserve:adapter_cache_misses_total", "device"): 3,
        ("caraserve:adapter_cache_misses_total", "host"): 3,
        ("caraserve:adapter_cache_evictions_total", "device"): 1,
        ("caraserve:adapter_cache_evictions_total", "host"): 0,
    }


def test_the_least_requested_adapter_is_evicted() -> None:
    world = World(device_bytes=100)
    for name in "abc":
        world.add(name)
    for name in "aab":
        world.serve(name)
    world.serve("c")
    assert world.on_device() == {"a", "c"}


def test_old_requests_count_less_than_recent_ones() -> None:
    world = World(device_bytes=100)
    for name in "abc":
        world.add(name)
    for name in "aaa":
        world.serve(name)
    world.now_s = 600.0
    world.serve("b")
    world.serve("c")
    assert world.on_device() == {"b", "c"}


def test_of_two_equally_requested_adapters_the_one_faster_to_reload_is_evicted() -> None:
    world = World(device_bytes=100)
    for name, size in (("small", 30), ("large", 60), ("new", 25)):
        world.add(name, size)
        world.serve(name)
    assert world.on_device() == {"large", "new"}


def test_an_adapter_in_use_is_never_evicted_and_the_next_gets_its_room_when_it_ends() -> None:
    world = World(device_bytes=50)
    world.add("a")
    world.add("b")
    first, second = world.ask("a"), world.ask("b")
    world.settle()
    assert world.on_device() == {"a"}
    world.end(first)
    world.settle()
    assert world.on_device() == {"b"}
    assert second.tier is AdapterTier.DEVICE


def test_adapters_that_wait_for_room_are_loaded_in_order() -> None:
    world = World(device_bytes=50)
    for name in "abc":
        world.add(name)
    asked = [world.ask(name) for name in "abc"]
    world.settle()
    for version in asked:
        assert world.on_device() == {version.digest}
        world.end(version)
        world.settle()


def test_admission_pauses_when_too_many_pass_an_adapter_that_waits() -> None:
    world = World(device_bytes=50)
    world.add("hot")
    world.add("cold")
    holding = [world.ask("hot")]
    world.settle()
    world.ask("cold")
    world.settle()
    for _ in range(MAX_BYPASSES):
        assert world.manager.device_loader.admits
        holding.append(world.ask("hot"))
    assert not world.manager.device_loader.admits
    for version in holding:
        world.end(version)
    world.settle()
    assert world.on_device() == {"cold"}
    assert world.manager.device_loader.admits


def test_the_host_cache_keeps_the_most_recent_images_within_its_bytes() -> None:
    world = World(device_bytes=45, host_bytes=2 * ALIGN_BYTES)
    for name in "abc":
        world.add(name)
        world.serve(name)
    assert {version.digest for version in world.manager.in_host()} == {"b", "c"}
    world.serve("b")
    assert world.manager.counters.disk_reads == 3
    world.serve("a")
    assert world.manager.counters.disk_reads == 4


def test_a_failed_read_is_reported_and_repeated_for_the_next_request() -> None:
    world = World()
    world.add("a")
    world.disk["a"] = AdapterRejected("broken")
    version = world.ask("a")
    world.settle()
    assert version.tier is AdapterTier.FAILED
    assert version.error is not None
    world.end(version)
    world.disk["a"] = 40
    world.serve("a")


def test_files_that_changed_since_registration_are_refused() -> None:
    world = World()
    world.add("a")
    world.manager.register("b", "other-digest", AdapterFolder(Path("a")), 40)
    version = world.ask("b")
    world.settle()
    assert version.tier is AdapterTier.FAILED
    assert "changed" in str(version.error)


def test_an_adapter_larger_than_the_device_is_refused() -> None:
    world = World(device_bytes=30)
    world.add("a")
    version = world.ask("a")
    world.settle()
    assert isinstance(version.error, AdapterRejected)


def test_an_adapter_without_a_name_stays_until_its_last_request_ends() -> None:
    world = World()
    world.add("a")
    version = world.ask("a")
    world.settle()
    world.manager.unregister("a")
    assert world.on_device() == {"a"}
    world.end(version)
    assert world.on_device() == set()
    assert world.manager.is_forgotten(version)
    assert world.device.bound == {}


def test_two_names_of_one_adapter_share_its_memory() -> None:
    world = World(device_bytes=50)
    world.add("a")
    world.manager.register("alias", "a", AdapterFolder(Path("a")), 40)
    first, second = world.ask("a"), world.ask("alias")
    world.settle()
    assert first is second
    assert len(world.device.bound) == 1
    world.manager.unregister("a")
    assert not world.manager.is_forgotten(first)


def test_an_adapter_that_no_request_needs_any_more_is_not_copied() -> None:
    world = World()
    world.add("a")
    version = world.ask("a")
    world.end(version)
    world.settle()
    assert version.tier is AdapterTier.HOST
    assert world.device.bound == {}


def test_adapters_get_room_in_the_host_cache_in_the_order_of_their_requests() -> None:
    """The host cache has room for one image and the device is full: an image that waits for the device is not
    evicted."""
    world = World(device_bytes=50, host_bytes=ALIGN_BYTES)
    for name in "abc":
        world.add(name)
    asked = [world.ask(name) for name in "abc"]
    world.settle()
    assert [version.tier for version in asked] == [AdapterTier.DEVICE, AdapterTier.HOST, AdapterTier.DISK]
    for version in asked:
        assert world.on_device() == {version.digest}
        world.end(version)
        world.settle()


def test_images_are_evicted_until_the_free_bytes_are_contiguous() -> None:
    world = World(device_bytes=200, host_bytes=3 * ALIGN_BYTES)
    for name in "abc":
        world.add(name)
        world.serve(name)
    world.manager.unregister("c")
    world.add("large", 2 * ALIGN_BYTES)
    world.serve("large")
    assert world.manager.counters.host_evictions == 2, "a's room and c's would have been enough bytes, but b is between"


def test_a_request_cancelled_while_it_waits_for_the_host_cache_leaks_nothing() -> None:
    world = World(device_bytes=50, host_bytes=ALIGN_BYTES)
    for name in "abc":
        world.add(name)
    first, second, third = (world.ask(name) for name in "abc")
    world.settle()
    world.end(third)
    world.end(first)
    world.end(second)
    world.settle()
    assert world.manager.counters.disk_reads == 2
    world.serve("c")


def test_a_failed_read_frees_its_room() -> None:
    world = World(host_bytes=ALIGN_BYTES)
    world.add("a")
    world.add("b")
    world.disk["a"] = AdapterRejected("broken")
    world.end(world.ask("a"))
    world.settle()
    assert world.arena.used_bytes == 0
    world.serve("b")


def test_a_failed_copy_is_reported_and_its_slot_unbound() -> None:
    world = World()
    world.add("a")
    world.device.failures["a"] = RuntimeError("no room")
    version = world.ask("a")
    world.settle()
    assert version.tier is AdapterTier.FAILED
    assert world.device.bound == {}
    world.end(version)
    world.serve("a")


def test_an_image_is_kept_while_it_is_copied() -> None:
    """CPU workers may be reading the image."""
    world = World(device_bytes=200, host_bytes=ALIGN_BYTES)
    world.add("a")
    world.add("b")
    copying = world.ask("a")
    world.reads.pop()()
    waiting = world.ask("b")
    assert (copying.tier, waiting.tier) == (AdapterTier.COPYING, AdapterTier.DISK)
    world.settle()
    assert (copying.tier, waiting.tier) == (AdapterTier.DEVICE, AdapterTier.DEVICE)


def test_a_downloaded_adapter_takes_room_on_the_device_with_its_first_layer() -> None:
    world = World(streamed_batches=1)
    world.add("a")
    version = world.ask("a")
    world.coming["a"]()
    assert version.tier is AdapterTier.STREAMING
    world.manager.check()
    world.settle()
    assert world.on_device() == {"a"}


def test_a_downloaded_adapter_takes_no_room_that_another_one_waits_for() -> None:
    world = World(streamed_batches=1, device_bytes=100)
    for name, size in (("held", 60), ("large", 60), ("small", 20)):
        world.add(name, size)
    held = world.ask("held")
    world.settle()
    large = world.ask("large")
    world.settle()
    small = world.ask("small")
    world.coming["small"]()
    assert (large.tier, small.tier) == (AdapterTier.HOST, AdapterTier.READING)
    world.end(held)
    world.settle()
    assert world.on_device() == {"large", "small"}


def test_a_pinned_adapter_stays_on_the_device_whoever_else_is_asked_for() -> None:
    world = World(device_bytes=100)
    for name in "abc":
        world.add(name)
    world.manager.set_pin("a", "device")
    for name in "abbccbc":
        world.serve(name)
    assert "a" in world.on_device()
    world.manager.set_pin("a", None)
    world.serve("b")
    world.serve("c")
    assert world.on_device() == {"b", "c"}


def test_an_adapter_pinned_in_host_memory_is_read_at_once_and_stays_there() -> None:
    world = World(device_bytes=40, host_bytes=192)
    for name in "abcd":
        world.add(name)
    world.manager.set_pin("a", "host")
    world.settle()
    assert world.manager.image("a") is not None
    for name in "bcdbcd":
        world.serve(name)
    assert world.manager.image("a") is not None
    assert world.manager.counters.host_evictions > 0


def test_a_pinned_adapter_of_other_instances_is_fetched_for_requests_alone_and_stays() -> None:
    world = World(device_bytes=40, host_bytes=192)
    for name in "bcd":
        world.add(name)
    world.disk["a"] = 40
    world.manager.set_pin("a", "host")
    world.manager.register("a", "a", RemoteSource("a"), 40)
    assert world.reads == []
    for name in "abcdbcd":
        world.serve(name)
    assert world.manager.image("a") is not None


def test_pins_beyond_half_of_a_cache_have_no_effect() -> None:
    """As those that were set on another instance with larger caches."""
    world = World(device_bytes=100, host_bytes=192)
    for name in "abc":
        world.manager.set_pin(name, "device")
        world.add(name)
    assert [world.manager.pin(name).pinned for name in "abc"] == ["device", "host", None]


def test_every_digest_that_comes_to_a_cache_or_leaves_one_is_reported() -> None:
    world, moved = World(device_bytes=50), list[str]()
    world.manager.on_move(moved.append)

    def reported() -> list[str]:
        found = moved.copy()
        moved.clear()
        return found

    for name in "ab":
        world.add(name)
    first = world.ask("a")
    world.reads.pop()()
    assert reported() == ["a"], "in the host cache"
    world.device.copies.pop()()
    assert reported() == ["a"], "on the device"
    world.end(first)
    world.ask("b")
    world.reads.pop()()
    assert reported() == ["b", "a"], "b in the host cache; a no longer on the device"
    world.settle()
    assert reported() == ["b"]
    world.manager.identify("b", "digest")
    assert reported() == ["digest"]
    world.manager.unregister("a")
    assert reported() == ["a"], "no longer in the host cache"


def test_an_adapter_is_read_from_the_folder_of_a_name_that_stands_for_it() -> None:
    world = World()
    folders = {name: AdapterFolder(Path(name)) for name in "abc"}
    for name in "ab":
        world.manager.register(name, "digest", folders[name], 40)
    adapter = world.manager.pin("a")
    assert adapter.source is folders["b"]
    world.manager.register("b", "digest", RemoteSource("digest"), 40)
    assert adapter.source is folders["a"], "other instances alone may have b's files now"
    world.manager.register("c", "digest", folders["c"], 40)
    world.manager.unregister("c")
    assert adapter.source is folders["a"]
    world.manager.unregister("a")
    world.manager.unregister("b")
    assert [folder.is_used for folder in folders.values()] == [True, False, False], "the request still reads it"
    world.manager.unpin(adapter)
    assert not folders["a"].is_used
