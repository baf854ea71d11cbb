"""Settings in the registry: the last write stays, removed ones are remembered, and the file always catches up."""

import asyncio
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from caraserve.config import TOMBSTONE_S
from caraserve.lora.registry import Registry, Setting
from caraserve.lora.replicated_settings import ReplicatedSettings, packed, unpacked
from caraserve.util.hybrid_clock import hlc_of

NOW = hlc_of(int(time.time() * 1000))


def setting(body: dict[str, Any] | None, hlc: int = NOW, writer: str = "b") -> Setting:
    return Setting("alias", "prod", body, hlc, writer)


def test_an_older_write_never_replaces_a_newer_one_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    newest = setting({"adapter": "v3"}, NOW, "c")
    with closing(Registry(file)) as registry:
        for batch in (
            [setting({"adapter": "v1"}, NOW - 9), newest, setting({"adapter": "v2"})],
            [setting(None, NOW - 1)],
        ):
            registry.put_settings(batch)
            assert registry.settings() == [newest]
    with closing(Registry(file)) as registry:
        assert registry.settings() == [newest]


def test_a_removal_is_remembered_for_30_days(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    removed = setting(None)
    old = Setting("alias", "old", None, NOW - hlc_of(int(TOMBSTONE_S * 1000) + 60_000), "b")
    with closing(Registry(file)) as registry:
        registry.put_settings([setting({"adapter": "v1"}, NOW - 1), removed, old])
    with closing(Registry(file)) as registry:
        assert registry.settings() == [removed]
        assert ReplicatedSettings(registry).attach("alias", lambda name, body: None) == {}


def test_a_time_of_a_wrong_clock_does_not_win_after_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    with closing(Registry(file)) as registry:
        registry.put_settings([setting({"adapter": "v1"}, NOW + hlc_of(10**10))])
    with closing(Registry(file)) as registry:
        assert [NOW <= one.hlc <= NOW + hlc_of(10**8) for one in registry.settings()] == [True]


async def test_a_write_is_in_the_file_before_observers_and_users_hear_of_it(tmp_path: Path) -> None:
    with closing(Registry(tmp_path / "registry.db")) as registry:
        heard: list[tuple[str, bool]] = []

        def note(who: str) -> None:
            heard.append((who, any(one.body == {"adapter": "v1"} for one in registry.settings())))

        settings = ReplicatedSettings(registry, [lambda one: note("observer")])
        settings.attach("alias", lambda name, body: note("user"))
        await settings.write("alias", "prod", {"adapter": "v1"})
        assert heard == [("user", True), ("observer", True)]


async def test_a_write_is_later_than_all_that_were_seen() -> None:
    settings = ReplicatedSettings(Registry(None), wall_ms=lambda: 5)
    settings.merge([setting({"adapter": "v1"})])
    await settings.write("alias", "prod", {"adapter": "v2"})
    assert [(one.body, one.hlc) for one in settings.all()] == [({"adapter": "v2"}, NOW + 1)]
    await settings.close()


async def test_a_write_that_a_later_one_overtakes_has_no_effect() -> None:
    registry, applied = Registry(None), list[Any]()
    settings = ReplicatedSettings(registry, wall_ms=lambda: 5)
    settings.attach("alias", lambda name, body: applied.append(body))
    writing = asyncio.create_task(settings.write("alias", "prod", {"adapter": "v1"}))
    await asyncio.sleep(0)  # it has its time now, and is being stored
    settings.merge([setting({"adapter": "v2"})])
    await writing
    await settings.close()
    assert applied == [{"adapter": "v2"}]
    assert registry.settings() == settings.all()


async def test_changes_of_other_instances_reach_the_file_whenever_they_come() -> None:
    """The second one comes up to ten turns of the event loop after the first has been written."""
    for turns in range(10):
        registry = Registry(None)
        settings = ReplicatedSettings(registry)
        settings.merge([setting({"adapter": "v1"})])
        while not registry.settings():  # noqa: ASYNC110 -- a file has no event
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        settings.merge([setting({"adapter": "v2"}, NOW + 1)])
        await settings.close()
        assert registry.settings() == settings.all()


@pytest.mark.parametrize("body", [{}, {"adapter": "v1", "text": "é\n" * 99}], ids=["empty", "text"])
def test_packing_keeps_a_body(body: dict[str, Any]) -> None:
    assert unpacked(packed(body)) == body


def test_no_text_unpacks_to_more_than_a_mebibyte() -> None:
    with pytest.raises(ValueError, match="no packed JSON"):
        unpacked(packed({"text": "a" * (1 << 20)}))
    assert len(json.dumps(unpacked(packed({"text": "a" * (1 << 19)})))) > 1 << 19


def test_text_of_which_no_response_could_be_made_is_not_unpacked() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        unpacked(packed({"labels": {"team": "\ud800"}}))
