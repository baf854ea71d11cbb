"""The tiers of adapters: which changes exist, which adapter is evicted, and that none in use ever is."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from caraserve.core.lora_layout import ALIGN_BYTES
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter import AdapterTier, RemoteSource
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.device_loader import MAX_BYPASSES
from tests.lora.tiers import CacheTiers


def test_metrics_count_hits_misses_and_evictions_of_both_caches() -> None:
    tiers = CacheTiers("abc", device_bytes=100)
    for name in "aabca":
        tiers.serve(name)
    text = "".join(tiers.manager.counters.families('engine="0"'))
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
    tiers = CacheTiers("abc", device_bytes=100)
    for name in "aab":
        tiers.serve(name)
    tiers.serve("c")
    assert tiers.on_device() == {"a", "c"}


def test_old_requests_count_less_than_recent_ones() -> None:
    tiers = CacheTiers("abc", device_bytes=100)
    for name in "aaa":
        tiers.serve(name)
    tiers.now_s = 600.0
    tiers.serve("b")
    tiers.serve("c")
    assert tiers.on_device() == {"b", "c"}


def test_of_two_equally_requested_adapters_the_one_faster_to_reload_is_evicted() -> None:
    tiers = CacheTiers(device_bytes=100)
    for name, size in (("small", 30), ("large", 60), ("new", 25)):
        tiers.add(name, size)
        tiers.serve(name)
    assert tiers.on_device() == {"large", "new"}


def test_an_adapter_in_use_is_never_evicted_and_the_next_gets_its_room_when_it_ends() -> None:
    tiers = CacheTiers("ab", device_bytes=50)
    first, second = tiers.ask("a"), tiers.ask("b")
    tiers.settle()
    assert tiers.on_device() == {"a"}
    tiers.end(first)
    tiers.settle()
    assert tiers.on_device() == {"b"}
    assert second.tier is AdapterTier.DEVICE


def test_adapters_that_wait_for_room_are_loaded_in_order() -> None:
    tiers = CacheTiers("abc", device_bytes=50)
    asked = [tiers.ask(name) for name in "abc"]
    tiers.settle()
    for version in asked:
        assert tiers.on_device() == {version.digest}
        tiers.end(version)
        tiers.settle()


def test_admission_pauses_when_too_many_pass_an_adapter_that_waits() -> None:
    tiers = CacheTiers(["hot", "cold"], device_bytes=50)
    holding = [tiers.ask("hot")]
    tiers.settle()
    tiers.ask("cold")
    tiers.settle()
    for _ in range(MAX_BYPASSES):
        assert tiers.manager.device_loader.admits
        holding.append(tiers.ask("hot"))
    assert not tiers.manager.device_loader.admits
    for version in holding:
        tiers.end(version)
    tiers.settle()
    assert tiers.on_device() == {"cold"}
    assert tiers.manager.device_loader.admits


def test_the_host_cache_keeps_the_most_recent_images_within_its_bytes() -> None:
    tiers = CacheTiers(device_bytes=45, host_bytes=2 * ALIGN_BYTES)
    for name in "abc":
        tiers.add(name)
        tiers.serve(name)
    assert {version.digest for version in tiers.manager.in_host()} == {"b", "c"}
    tiers.serve("b")
    assert tiers.manager.counters.disk_reads == 3
    tiers.serve("a")
    assert tiers.manager.counters.disk_reads == 4


def test_a_failed_read_is_reported_and_repeated_for_the_next_request() -> None:
    tiers = CacheTiers("a")
    tiers.disk["a"] = AdapterRejected("broken")
    version = tiers.ask("a")
    tiers.settle()
    assert version.tier is AdapterTier.FAILED
    assert version.error is not None
    tiers.end(version)
    tiers.disk["a"] = 40
    tiers.serve("a")


def test_files_that_changed_since_registration_are_refused() -> None:
    tiers = CacheTiers("a")
    tiers.manager.register("b", "other-digest", AdapterFolder(Path("a")), 40)
    version = tiers.ask("b")
    tiers.settle()
    assert version.tier is AdapterTier.FAILED
    assert "changed" in str(version.error)


def test_an_adapter_larger_than_the_device_is_refused() -> None:
    tiers = CacheTiers("a", device_bytes=30)
    version = tiers.ask("a")
    tiers.settle()
    assert isinstance(version.error, AdapterRejected)


def test_an_adapter_without_a_name_stays_until_its_last_request_ends() -> None:
    tiers = CacheTiers("a")
    version = tiers.ask("a")
    tiers.settle()
    tiers.manager.unregister("a")
    assert tiers.on_device() == {"a"}
    tiers.end(version)
    assert tiers.on_device() == set()
    assert tiers.manager.is_forgotten(version)
    assert tiers.device.bound == {}


def test_two_names_of_one_adapter_share_its_memory() -> None:
    tiers = CacheTiers("a", device_bytes=50)
    tiers.manager.register("alias", "a", AdapterFolder(Path("a")), 40)
    first, second = tiers.ask("a"), tiers.ask("alias")
    tiers.settle()
    assert first is second
    assert len(tiers.device.bound) == 1
    tiers.manager.unregister("a")
    assert not tiers.manager.is_forgotten(first)


def test_an_adapter_that_no_request_needs_any_more_is_not_copied() -> None:
    tiers = CacheTiers("a")
    version = tiers.ask("a")
    tiers.end(version)
    tiers.settle()
    assert version.tier is AdapterTier.HOST
    assert tiers.device.bound == {}


def test_adapters_get_room_in_the_host_cache_in_the_order_of_their_requests() -> None:
    """The host cache has room for one image and the device is full: an image that waits for the device is not
    evicted."""
    tiers = CacheTiers("abc", device_bytes=50, host_bytes=ALIGN_BYTES)
    asked = [tiers.ask(name) for name in "abc"]
    tiers.settle()
    assert [version.tier for version in asked] == [AdapterTier.DEVICE, AdapterTier.HOST, AdapterTier.DISK]
    for version in asked:
        assert tiers.on_device() == {version.digest}
        tiers.end(version)
        tiers.settle()


def test_images_are_evicted_until_the_free_bytes_are_contiguous() -> None:
    tiers = CacheTiers(device_bytes=200, host_bytes=3 * ALIGN_BYTES)
    for name in "abc":
        tiers.add(name)
        tiers.serve(name)
    tiers.manager.unregister("c")
    tiers.add("large", 2 * ALIGN_BYTES)
    tiers.serve("large")
    assert tiers.manager.counters.host_evictions == 2, "a's room and c's would have been enough bytes, but b is between"


def test_a_request_cancelled_while_it_waits_for_the_host_cache_leaks_nothing() -> None:
    tiers = CacheTiers("abc", device_bytes=50, host_bytes=ALIGN_BYTES)
    first, second, third = (tiers.ask(name) for name in "abc")
    tiers.settle()
    tiers.end(third)
    tiers.end(first)
    tiers.end(second)
    tiers.settle()
    assert tiers.manager.counters.disk_reads == 2
    tiers.serve("c")


def test_a_failed_read_frees_its_room() -> None:
    tiers = CacheTiers("ab", host_bytes=ALIGN_BYTES)
    tiers.disk["a"] = AdapterRejected("broken")
    tiers.end(tiers.ask("a"))
    tiers.settle()
    assert tiers.arena.used_bytes == 0
    tiers.serve("b")


def test_a_failed_copy_is_reported_and_its_slot_unbound() -> None:
    tiers = CacheTiers("a")
    tiers.device.failures["a"] = RuntimeError("no room")
    version = tiers.ask("a")
    tiers.settle()
    assert version.tier is AdapterTier.FAILED
    assert tiers.device.bound == {}
    tiers.end(version)
    tiers.serve("a")


def test_an_image_is_kept_while_it_is_copied() -> None:
    """CPU workers may be reading the image."""
    tiers = CacheTiers("ab", device_bytes=200, host_bytes=ALIGN_BYTES)
    copying = tiers.ask("a")
    tiers.reads.pop()()
    waiting = tiers.ask("b")
    assert (copying.tier, waiting.tier) == (AdapterTier.COPYING, AdapterTier.DISK)
    tiers.settle()
    assert (copying.tier, waiting.tier) == (AdapterTier.DEVICE, AdapterTier.DEVICE)


def test_a_downloaded_adapter_takes_room_on_the_device_with_its_first_layer() -> None:
    tiers = CacheTiers("a", streamed_batches=1)
    version = tiers.ask("a")
    tiers.coming["a"]()
    assert version.tier is AdapterTier.STREAMING
    tiers.manager.check()
    tiers.settle()
    assert tiers.on_device() == {"a"}


def test_a_downloaded_adapter_takes_no_room_that_another_one_waits_for() -> None:
    tiers = CacheTiers(streamed_batches=1, device_bytes=100)
    for name, size in (("held", 60), ("large", 60), ("small", 20)):
        tiers.add(name, size)
    held = tiers.ask("held")
    tiers.settle()
    large = tiers.ask("large")
    tiers.settle()
    small = tiers.ask("small")
    tiers.coming["small"]()
    assert (large.tier, small.tier) == (AdapterTier.HOST, AdapterTier.READING)
    tiers.end(held)
    tiers.settle()
    assert tiers.on_device() == {"large", "small"}


def test_a_pinned_adapter_stays_on_the_device_whoever_else_is_asked_for() -> None:
    tiers = CacheTiers("abc", device_bytes=100)
    tiers.manager.set_pin("a", "device")
    for name in "abbccbc":
        tiers.serve(name)
    assert "a" in tiers.on_device()
    tiers.manager.set_pin("a", None)
    tiers.serve("b")
    tiers.serve("c")
    assert tiers.on_device() == {"b", "c"}


def test_an_adapter_pinned_in_host_memory_is_read_at_once_and_stays_there() -> None:
    tiers = CacheTiers("abcd", device_bytes=40, host_bytes=192)
    tiers.manager.set_pin("a", "host")
    tiers.settle()
    assert tiers.manager.image("a") is not None
    for name in "bcdbcd":
        tiers.serve(name)
    assert tiers.manager.image("a") is not None
    assert tiers.manager.counters.host_evictions > 0


def test_a_pinned_adapter_of_other_instances_is_fetched_for_requests_alone_and_stays() -> None:
    tiers = CacheTiers("bcd", device_bytes=40, host_bytes=192)
    tiers.disk["a"] = 40
    tiers.manager.set_pin("a", "host")
    tiers.manager.register("a", "a", RemoteSource("a"), 40)
    assert tiers.reads == []
    for name in "abcdbcd":
        tiers.serve(name)
    assert tiers.manager.image("a") is not None


def test_pins_beyond_half_of_a_cache_have_no_effect() -> None:
    """As those that were set on another instance with larger caches."""
    tiers = CacheTiers(device_bytes=100, host_bytes=192)
    for name in "abc":
        tiers.manager.set_pin(name, "device")
        tiers.add(name)
    assert [tiers.manager.pin(name).pinned for name in "abc"] == ["device", "host", None]


def test_every_digest_that_comes_to_a_cache_or_leaves_one_is_reported() -> None:
    tiers, moved = CacheTiers(device_bytes=50), list[str]()
    tiers.manager.on_move(moved.append)

    def reported() -> list[str]:
        found = moved.copy()
        moved.clear()
        return found

    for name in "ab":
        tiers.add(name)
    first = tiers.ask("a")
    tiers.reads.pop()()
    assert reported() == ["a"], "in the host cache"
    tiers.device.copies.pop()()
    assert reported() == ["a"], "on the device"
    tiers.end(first)
    tiers.ask("b")
    tiers.reads.pop()()
    assert reported() == ["b", "a"], "b in the host cache; a no longer on the device"
    tiers.settle()
    assert reported() == ["b"]
    tiers.manager.identify("b", "digest")
    assert reported() == ["digest"]
    tiers.manager.unregister("a")
    assert reported() == ["a"], "no longer in the host cache"


def test_an_adapter_is_read_from_the_folder_of_a_name_that_stands_for_it() -> None:
    tiers = CacheTiers()
    folders = {name: AdapterFolder(Path(name)) for name in "abc"}
    for name in "ab":
        tiers.manager.register(name, "digest", folders[name], 40)
    adapter = tiers.manager.pin("a")
    assert adapter.source is folders["b"]
    tiers.manager.register("b", "digest", RemoteSource("digest"), 40)
    assert adapter.source is folders["a"], "other instances alone may have b's files now"
    tiers.manager.register("c", "digest", folders["c"], 40)
    tiers.manager.unregister("c")
    assert adapter.source is folders["a"]
    tiers.manager.unregister("a")
    tiers.manager.unregister("b")
    assert [folder.is_used for folder in folders.values()] == [True, False, False], "the request still reads it"
    tiers.manager.unpin(adapter)
    assert not folders["a"].is_used
