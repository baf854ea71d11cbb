"""An adapter is deleted with the aliases that stand for it then, whatever else changes them at the same time."""

import asyncio
from collections.abc import Callable

import pytest

from caraserve.lora.aliases import Alias, Aliases
from caraserve.lora.management import AdapterManagement
from caraserve.lora.registry import Setting
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.settings import NO_DEFAULTS, SettingsStore
from tests.cluster.nodes import until
from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver, tar_of


class Deletion:
    """A deletion of an adapter that no other instance has, and that may be deleted."""

    def check(self) -> None:
        pass

    def remove_elsewhere(self) -> None:
        return None

    def is_deleted(self) -> bool:
        return True


async def managed(receiver: Receiver, replicated: ReplicatedSettings) -> AdapterManagement:
    """Stores the adapter `x`, with the aliases a, b and c."""
    await receiver.put("x", tar_of(write_adapter(receiver.root.parent / "made")))
    aliases = Aliases(replicated, lambda name: True)
    for name in "abc":
        await aliases.point(name, "x")
    return AdapterManagement(
        receiver.uploads, aliases, SettingsStore(replicated, receiver.catalog, lambda _: NO_DEFAULTS)
    )


@pytest.mark.parametrize("is_first", [True, False], ids=["deletion first", "change first"])
@pytest.mark.parametrize("to", ["y", None], ids=["switched", "removed"])
async def test_an_alias_changed_meanwhile_is_left_as_it_is(receiver: Receiver, to: str | None, is_first: bool) -> None:
    management = await managed(receiver, ReplicatedSettings(receiver.registry))
    aliases, tasks = management.aliases, list[asyncio.Task[object]]()

    async def queued(begin: Callable[[], asyncio.Task[object]]) -> None:
        tasks.append(begin())
        await until(lambda: len(aliases._writing._waiters or ()) == len(tasks))

    def delete() -> asyncio.Task[object]:
        return asyncio.create_task(management.delete("x", Deletion()))

    def change() -> asyncio.Task[object]:
        return asyncio.create_task(aliases.remove("c") if to is None else aliases.point("c", to))

    async with aliases._writing:
        for begin in (delete, change) if is_first else (change, delete):
            await queued(begin)
    deleted, _ = sorted(
        await asyncio.gather(*tasks, return_exceptions=True), key=lambda one: not hasattr(one, "keeps_files")
    )
    assert deleted.aliases == (("a", "b", "c") if is_first else ("a", "b"))  # type: ignore[attr-defined]
    assert [(alias.name, alias.adapter) for alias in aliases.all()] == ([] if to is None else [("c", "y")])


async def test_an_alias_that_another_instance_switches_meanwhile_is_left_as_it_is(receiver: Receiver) -> None:
    def switch(written: Setting) -> None:
        if written.text is None:
            replicated.merge([Setting("alias", "b", '{"adapter": "y"}', written.hlc + 1, "other")])

    replicated = ReplicatedSettings(receiver.registry, [switch])
    management = await managed(receiver, replicated)
    assert (await management.delete("x", Deletion())).aliases == ("a", "c")
    assert management.aliases.all() == [Alias("b", "y")]
    await replicated.close()
