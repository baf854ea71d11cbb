"""Aliases and settings of adapters on every instance: under loss, partitions and restarts, and of any size."""

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from caraserve.cluster.membership.events import EntriesChanged
from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.state.lww_map import Entry, is_setting
from caraserve.cluster.state.replicated_map import REGISTRY, RegisteredAdapter
from caraserve.cluster.state.setting_entries import entry_of, settings_in, stored_entry_of
from caraserve.core.adapter_rules import MAX_SETTING
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.aliases import Alias, Aliases
from caraserve.lora.registry import Registry, Setting
from caraserve.lora.replicated_settings import ReplicatedSettings, packed
from tests.cluster.fleet import Fleet


class Instance:
    """The aliases and settings of one instance of a simulated fleet. Its registry outlives a restart."""

    def __init__(self, fleet: Fleet, name: str, registry: Registry) -> None:
        self.fleet, self.name, self.registry = fleet, name, registry
        self.protocol: ClusterProtocol = fleet.nodes[name].protocol
        self.settings = ReplicatedSettings(registry, [self.share], lambda: self.protocol._wall_ms(fleet.now))
        # As `Node` does.
        entries = [stored_entry_of(setting, name) for setting in self.settings.all()]
        self.protocol.restore(filter(None, entries), fleet.now)
        self.aliases = Aliases(self.settings, self.knows)
        self.bodies: dict[str, dict[str, Any]] = {}
        self.settings.attach("adapter", self._apply)
        self._seen = 0
        self._resolved = False

    def _apply(self, name: str, body: dict[str, Any] | None) -> bool:
        self.bodies.pop(name, None)
        if body is not None:
            self.bodies[name] = body
        return True

    def share(self, setting: Setting) -> None:
        self.protocol.share(entry_of(setting, self.name), self.fleet.now)

    def knows(self, name: str) -> bool:
        return self.protocol.state.adapter(name) is not None

    def register(self, name: str) -> None:
        self.protocol.register(RegisteredAdapter(name, "d" * 64, 8, 1), self.fleet.now)

    def receive(self) -> None:
        """Takes what has arrived; fails if prod stands for no known adapter although it did before."""
        outputs = self.fleet.nodes[self.name].outputs
        for _, output in outputs[self._seen :]:
            if isinstance(output, EntriesChanged) and output.owner == REGISTRY:
                self.settings.merge(settings_in(entry for entry in output.entries if is_setting(entry.key)))
        self._seen = len(outputs)
        if self.aliases.find("prod") is not None:
            is_known = self.knows(self.aliases.target("prod", self.knows))
            assert is_known or not self._resolved, f"prod stands for no known adapter on {self.name}"
            self._resolved = is_known


class SharingFleet:
    """Instances that share settings, on a simulated network."""

    def __init__(self, size: int, seed: int = 0, **network: float) -> None:
        self.fleet = Fleet(seed, **network)
        self.names = [f"n{index}" for index in range(size)]
        self.registries = {name: Registry(None) for name in self.names}
        self.running: dict[str, Instance] = {}

    async def start(self, *names: str) -> None:
        for name in names or self.names:
            self.fleet.start(name, self.names[:2])
            self.running[name] = Instance(self.fleet, name, self.registries[name])

    async def kill(self, name: str) -> None:
        """Kills an instance once its registry has been written."""
        await self.running.pop(name).settings.close()
        self.fleet.kill(name)

    async def run(self, seconds: float) -> None:
        ends_s = self.fleet.now + seconds
        while self.fleet.now < ends_s:
            self.fleet.run(0.02)
            for instance in self.running.values():
                instance.receive()

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        ends_s = self.fleet.now + seconds
        while not condition():
            assert self.fleet.now < ends_s, f"not within {seconds} s"
            await self.run(0.02)

    def all_have(self, alias: Alias | None, name: str = "prod") -> bool:
        return all(instance.aliases.find(name) == alias for instance in self.running.values())

    def agree(self) -> bool:
        """Whether all instances have the same aliases, in memory and in their registries."""
        found = [instance.aliases.all() for instance in self.running.values()]
        return self.fleet.agree() and self.fleet.same_entries() and all(one == found[0] for one in found)


async def together(size: int) -> SharingFleet:
    """Starts instances, and returns them when each sees all."""
    sharing = SharingFleet(size)
    await sharing.start()
    await sharing.until(sharing.fleet.agree, 10)
    return sharing


async def test_a_switch_and_a_rollback_hold_on_every_instance_within_a_second() -> None:
    sharing = await together(5)
    a, b, c, *_ = sharing.running.values()
    for name in ("v1", "v2"):
        a.register(name)
    await a.aliases.point("prod", "v1")
    await a.aliases.point("prod", "v2")
    assert a.aliases.find("prod") == Alias("prod", "v2", "v1")  # before any instance has heard of it
    await sharing.until(lambda: sharing.all_have(Alias("prod", "v2", "v1")), 1)
    await b.aliases.point("prod", "v1")
    await sharing.until(lambda: sharing.all_have(Alias("prod", "v1", "v2")), 1)
    await c.aliases.remove("prod")
    await sharing.until(lambda: sharing.all_have(None), 1)


async def test_the_last_of_conflicting_writes_wins_on_every_instance() -> None:
    sharing = await together(4)
    a, _, _, d = sharing.running.values()
    for name in ("v1", "v2"):
        a.register(name)
        d.register(name)
    sharing.fleet.partition(["n0", "n1"], ["n2", "n3"], reset=True)
    await d.aliases.point("prod", "v2")
    await sharing.run(3)
    await a.aliases.point("prod", "v1")
    await sharing.run(3)
    assert [one.aliases.get("prod").adapter for one in sharing.running.values()] == ["v1", "v1", "v2", "v2"]
    sharing.fleet.heal()
    await sharing.until(lambda: sharing.all_have(Alias("prod", "v1")), 10)


async def test_an_instance_that_was_away_gets_what_was_switched_and_removed_meanwhile() -> None:
    sharing = SharingFleet(3)
    await sharing.start()
    a, *_ = sharing.running.values()
    for name in ("v1", "v2"):
        a.register(name)
    for alias in ("prod", "gone"):
        await a.aliases.point(alias, "v1")
    await sharing.until(lambda: sharing.all_have(Alias("prod", "v1")) and sharing.agree(), 10)
    await sharing.kill("n2")
    await a.aliases.point("prod", "v2")
    await a.aliases.remove("gone")
    await sharing.run(1)
    await sharing.start("n2")
    assert sharing.running["n2"].aliases.get("prod").adapter == "v1"  # until it has met the others
    await sharing.until(lambda: sharing.all_have(Alias("prod", "v2", "v1")) and sharing.all_have(None, "gone"), 10)


async def test_a_restart_of_all_instances_brings_back_settings_and_no_removed_ones() -> None:
    sharing = SharingFleet(3)
    await sharing.start()
    a, b, _ = sharing.running.values()
    a.register("v1")
    for alias in ("prod", "gone"):
        await a.aliases.point(alias, "v1")
    await sharing.until(lambda: sharing.all_have(Alias("gone", "v1"), "gone"), 10)
    await sharing.kill("n2")  # has not heard of the removal
    await b.aliases.remove("gone")
    await sharing.until(lambda: sharing.all_have(None, "gone"), 10)
    for name in ("n0", "n1"):
        await sharing.kill(name)
    await sharing.start("n2", "n0", "n1")
    assert sharing.running["n0"].aliases.find("prod") == Alias("prod", "v1")
    await sharing.until(lambda: sharing.fleet.agree() and sharing.all_have(None, "gone"), 10)


async def test_a_write_that_one_instance_alone_has_stored_is_told_after_its_restart() -> None:
    sharing = await together(3)
    a, *_ = sharing.running.values()
    a.register("v1")
    await a.aliases.point("prod", "v1")  # answered, and told to no instance before it is killed
    await sharing.kill("n0")
    await sharing.run(1)
    assert sharing.all_have(None)
    await sharing.start("n0")
    await sharing.until(lambda: sharing.all_have(Alias("prod", "v1")), 10)


@pytest.mark.parametrize("seed", range(4))
async def test_an_alias_always_stands_for_a_known_adapter_and_in_the_end_for_the_same(seed: int) -> None:
    """Checked every 20 ms by `Instance.receive`, on every instance on which the alias has stood for one."""
    sharing = SharingFleet(4, seed, loss=0.1, duplicates=0.1, delay_s=0.05)
    await sharing.start()
    rng = Random(seed)
    for step in range(40):
        instance = rng.choice(list(sharing.running.values()))
        away = [name for name in sharing.names if name not in sharing.running]
        match rng.randrange(9):
            case 0:
                sharing.fleet.partition(sharing.names[:2], sharing.names[2:], reset=rng.random() < 0.5)
            case 1:
                sharing.fleet.heal()
            case 2 if len(away) < 2:
                await sharing.kill(instance.name)
            case 3 if away:
                await sharing.start(away[0])
            case 4 if (alias := instance.aliases.find("prod")) is not None and alias.previous is not None:
                if instance.knows(alias.previous):
                    await instance.aliases.point("prod", alias.previous)
            case _:
                instance.register(f"v{step}")
                await instance.aliases.point("prod", f"v{step}")
        await sharing.run(rng.choice([0.02, 0.1, 1.0]))
    sharing.fleet.heal()
    sharing.fleet.loss = 0.0
    for name in sharing.names:
        if name not in sharing.running:
            await sharing.start(name)
    await sharing.until(sharing.agree, 30)
    alias = sharing.running["n0"].aliases.get("prod")
    for instance in sharing.running.values():
        await instance.settings.close()
        stored = {setting.key: setting.text for setting in instance.registry.settings()}
        assert json.loads(stored["alias", "prod"] or "") == {"adapter": alias.adapter, "previous": alias.previous}


def text_of(length: int) -> str:
    """Returns a text that hardly compresses."""
    rng = Random(1)
    return "".join(chr(rng.randrange(32, 127)) for _ in range(length))


async def test_settings_of_64_kib_are_shared_whole() -> None:
    sharing = await together(3)
    body = {"labels": {}, "pinned": None, "text": text_of(65_536)}
    for number in range(5):
        await sharing.running["n0"].settings.write("adapter", f"sql{number}", body)
    await sharing.until(lambda: all(len(one.bodies) == 5 for one in sharing.running.values()), 2)
    assert all(found == body for found in sharing.running["n2"].bodies.values())
    await sharing.kill("n2")
    sharing.registries["n2"] = Registry(None)
    await sharing.start("n2")
    await sharing.until(lambda: len(sharing.running["n2"].bodies) == 5, 10)


async def test_settings_that_no_frame_holds_are_refused_and_change_nothing() -> None:
    sharing = SharingFleet(1)
    await sharing.start()
    settings = sharing.running["n0"].settings
    with pytest.raises(AdapterRejected, match=f"over {MAX_SETTING} characters"):
        await settings.write("adapter", "sql", {"text": text_of(MAX_SETTING)})
    assert settings.all() == []


async def test_a_write_that_cannot_be_stored_changes_nothing_anywhere() -> None:
    sharing = await together(2)
    sharing.registries["n0"].close()
    with pytest.raises(CaraServeError, match="cannot be written"):
        await sharing.running["n0"].aliases.point("prod", "v1")
    await sharing.run(1)
    assert sharing.all_have(None)


@pytest.mark.parametrize(
    "value", [("x",), ("e30=" * 2,), (packed("[1]"),), ()], ids=["base64", "compression", "array", "empty"]
)
async def test_settings_that_cannot_be_read_are_left_out_and_passed_on(
    value: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    sharing = await together(2)
    a, b = sharing.running.values()
    hlc = entry_of(Setting("alias", "prod", None, a.settings._clock.next(a.settings._wall_ms())), "n0").hlc
    assert a.protocol.share(Entry("alias/prod", value, hlc, "n0"), sharing.fleet.now)
    await sharing.until(lambda: sharing.fleet.same_entries(), 5)
    assert b.aliases.all() == []
    assert "settings for alias/prod that cannot be read" in caplog.text or "that is no settings" in caplog.text
    assert list(b.protocol.state.adapters()) == []
    await asyncio.gather(a.settings.close(), b.settings.close())
