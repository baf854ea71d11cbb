"""Settings in the registry: the last write stays, removed ones are remembered, and the file always catches up."""

import asyncio
import json
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.adapter_rules import SETTING_KINDS, TOMBSTONE_S
from caraserve.errors import AdapterRejected
from caraserve.lora import replicated_settings
from caraserve.lora.aliases import Alias, Aliases
from caraserve.lora.registry import Registry, Setting
from caraserve.lora.replicated_settings import ReplicatedSettings, body_of, packed, unpacked
from caraserve.util.hybrid_clock import hlc_of

NOW = hlc_of(int(time.time() * 1000))


def setting(body: dict[str, Any] | None, hlc: int = NOW, writer: str = "b", name: str = "prod") -> Setting:
    return Setting("alias", name, None if body is None else json.dumps(body), hlc, writer)


def bodies(settings: Iterable[Setting]) -> list[dict[str, Any] | None]:
    return [None if one.text is None else json.loads(one.text) for one in settings]


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
        ReplicatedSettings(registry).attach("alias", lambda name, body: pytest.fail(f"{name} came back"))


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
            heard.append((who, bodies(registry.settings()) == [{"adapter": "v1"}]))

        settings = ReplicatedSettings(registry, [lambda one: note("observer")])
        settings.attach("alias", lambda name, body: note("user") is None)
        await settings.write("alias", "prod", {"adapter": "v1"})
        assert heard == [("user", True), ("observer", True)]


async def test_a_write_is_later_than_all_that_were_seen() -> None:
    settings = ReplicatedSettings(Registry(None), wall_ms=lambda: 5)
    settings.merge([setting({"adapter": "v1"})])
    await settings.write("alias", "prod", {"adapter": "v2"})
    assert bodies(settings.all()) == [{"adapter": "v2"}]
    assert [one.hlc for one in settings.all()] == [NOW + 1]
    await settings.close()


async def test_a_write_that_a_later_one_overtakes_has_no_effect() -> None:
    registry, applied = Registry(None), list[Any]()
    settings = ReplicatedSettings(registry, wall_ms=lambda: 5)
    settings.attach("alias", lambda name, body: applied.append(body) is None)
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


# --- what other instances send ---


@pytest.mark.parametrize("text", ["{}", json.dumps({"adapter": "v1", "text": "é\n" * 99})], ids=["empty", "text"])
def test_packing_keeps_a_text(text: str) -> None:
    assert unpacked(packed(text), 4096) == text


def test_no_text_unpacks_to_more_than_is_allowed() -> None:
    assert unpacked(packed("a" * 1000), 1000) == "a" * 1000
    with pytest.raises(ValueError, match="more than 999 bytes"):
        unpacked(packed("a" * 1000), 999)


@pytest.mark.parametrize("text", ["x", "e30=" * 2, packed("{}")[:-4]], ids=["base64", "compression", "end"])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"compressed text|cut short"):
        unpacked(text, 1000)


LISTS = "[" + "[]," * 1000 + "[]]"
INVALID = {
    "JSON": "{",
    "object": "[1]",
    "depth": '{"a":' * 5000 + "1" + "}" * 5000,
    "surrogate": json.dumps({"labels": {"team": "\ud800"}}),
    "many lists": f'{{"a":{LISTS}}}',
    "many lists after an open string": f'{{"a":{LISTS},"b":"',
    "length": json.dumps({"a": "x" * SETTING_KINDS["adapter"]}),
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
async def test_a_text_that_is_no_body_is_neither_kept_nor_stored(text: str) -> None:
    registry, applied = Registry(None), list[Any]()
    settings = ReplicatedSettings(registry)
    settings.attach("adapter", lambda name, body: applied.append(body) is None)
    valid = Setting("adapter", "sql", '{"labels":{}}', NOW - 1, "b")
    settings.merge([valid, Setting("adapter", "sql", text, NOW, "b"), Setting("adapter", "chef", text, NOW, "b")])
    await settings.close()
    assert settings.all() == registry.settings() == [valid]
    assert applied == [{"labels": {}}]


def test_many_values_in_strings_are_text() -> None:
    text = json.dumps({"chat_template": '{% for a in b, "c" %}[],[]' * 2000, "pinned": None})
    assert body_of(Setting("adapter", "sql", text)) == json.loads(text)


async def test_a_body_that_its_user_does_not_take_leaves_the_one_before() -> None:
    registry = Registry(None)
    settings = ReplicatedSettings(registry)
    aliases = Aliases(settings, lambda name: True)
    settings.merge([setting({"adapter": "v1"}, NOW - 1)])
    settings.merge([setting({"adapter": 7}), setting({"adapter": []}, name="gone")])
    await settings.close()
    assert aliases.all() == [Alias("prod", "v1")]
    assert bodies(registry.settings()) == [{"adapter": "v1"}]


async def test_all_settings_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_settings, "_MOST_BYTES", 3 * (replicated_settings._SETTING_BYTES + 50))
    registry = Registry(None)
    settings = ReplicatedSettings(registry)
    aliases = Aliases(settings, lambda name: True)
    settings.merge(setting({"adapter": f"v{number}"}, name=f"a{number}") for number in range(9))
    await settings.close()
    kept = [alias.name for alias in aliases.all()]
    assert kept == ["a0", "a1", "a2"]
    with pytest.raises(AdapterRejected, match="remove some first"):
        await aliases.point("mine", "v1")
    await aliases.remove("a0")
    assert len(settings.all()) == len(registry.settings()) == 3


async def test_the_oldest_removals_are_forgotten_beyond_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated_settings, "_MOST_REMOVED", 2)
    with closing(Registry(tmp_path / "registry.db")) as registry:
        settings = ReplicatedSettings(registry)
        for number in range(5):
            settings.merge([setting(None, NOW + number, name=f"a{number}")])
        await settings.close()
        settings.merge([setting(None, NOW + 5, name="a5"), setting({"adapter": "v1"}, NOW + 6, name="a1")])
        await settings.close()
        names = {one.name for one in settings.all()}
        assert names == {one.name for one in registry.settings()} == {"a4", "a5", "a1"}
    with closing(Registry(tmp_path / "registry.db")) as registry:
        assert {one.name for one in registry.settings()} == names


async def test_kinds_of_later_versions_are_not_kept_and_their_rows_stay(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    row = ("later", "prod", "a body of a later version")
    with closing(Registry(file)) as registry:
        registry._connection.execute("INSERT INTO settings VALUES (?, ?, ?)", row)
    with closing(Registry(file)) as registry:
        settings = ReplicatedSettings(registry)
        settings.merge([Setting("later", "test", "{}", NOW, "b")])
        await settings.close()
        assert settings.all() == registry.settings() == registry.complaints == []
        assert registry._connection.execute("SELECT * FROM settings").fetchall() == [row]
