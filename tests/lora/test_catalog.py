"""The adapters of a server at its start: those that the user names must be valid, those found or remembered are left
out if they are not. A folder that cannot be used at run time is logged once."""

import asyncio
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import numpy as np
import pytest

from caraserve.config import LOADING_MODES
from caraserve.core.backend import Limits
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.cpu.shared_memory import Arena
from caraserve.errors import AdapterRejected, CaraServeError, ConfigError, Forbidden
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora import inspections
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.catalog import Catalog, CatalogRules
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.inspections import Inspection, Inspections
from caraserve.lora.manager import AdapterManager
from caraserve.lora.peft import inspect_adapter
from caraserve.lora.registry import AdapterInfo, Registry
from caraserve.lora.served_base import ANY_BASE, ServedBase
from caraserve.lora.start_policy import StartPolicy
from caraserve.model.families import plan_of
from tests.fake_backend import FakeBackend
from tests.lora.folders import FIELDS, SPEC, write_adapter

_MIB = 1 << 20
_LIMITS = Limits(
    num_blocks=4, block_tokens=4, num_slots=2, adapter_slots=4, max_step_tokens=8, max_context=16, embedding_size=1
)


def catalog(
    registry: Registry, reader: AdapterReader, *roots: Path, device_bytes: int = _MIB, base: ServedBase = ANY_BASE
) -> Catalog:
    """Returns a catalog over a fake backend that is never used."""
    room, arena = MemoryBudget(_LIMITS, device_bytes), Arena(aligned_bytes(_MIB))
    loading = StartPolicy(LOADING_MODES["overlapped"], len(SPEC.layers), 1e9, None)
    manager = AdapterManager(FakeBackend(_LIMITS), room, arena, reader.read, lambda call: None, lambda: 0.0, loading)
    return Catalog(
        SPEC,
        registry,
        manager,
        reader,
        CatalogRules("base", roots, device_bytes, arena.num_bytes, False, watched=next(iter(roots), None), base=base),
    )


@pytest.fixture
def reader() -> Iterator[AdapterReader]:
    made = AdapterReader(SPEC, lambda call: call())
    yield made
    made.close()


@pytest.fixture
def adapters_dir(tmp_path: Path) -> Path:
    """Returns a folder with a valid adapter `good`, to which tests add invalid ones."""
    write_adapter(tmp_path / "adapters" / "good")
    return tmp_path / "adapters"


def truncated(folder: Path) -> None:
    path = write_adapter(folder) / TENSORS_NAME
    os.truncate(path, path.stat().st_size - 100)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, "is not a valid safetensors file"),
    "of an unknown field": (lambda folder: write_adapter(folder, {"use_magic": 7}), "use_magic is 7"),
    "without tensors": (lambda folder: (write_adapter(folder) / TENSORS_NAME).unlink(), f"has no {TENSORS_NAME}"),
    "too large": (lambda folder: write_adapter(folder, {"r": 512}, wide()), "more than --lora-pool-bytes"),
}


def wide() -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    halves = {"A": (512, 64), "B": (64, 512)}
    return {name.format(at, half): np.ones(shape, np.float32) for at in (0, 1) for half, shape in halves.items()}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_served_is_left_out_with_one_complaint_if_it_was_found_and_refused_if_the_user_named_it(
    adapters_dir: Path, reader: AdapterReader, kind: str
) -> None:
    make, reason = BAD[kind]
    make(adapters_dir / "bad")
    given = {name: adapters_dir / name for name in ("bad", "good")}
    with closing(Registry(None)) as registry:
        made = catalog(registry, reader, adapters_dir, device_bytes=100_000)
        (complaint,) = made.add_at_start(given.items(), lambda: None, found=given)
        (refusal,) = made.refused.all()
        assert [info.name for info in made.all()] == [info.name for info in registry.all()] == ["good"]
    assert f"{str(adapters_dir / 'bad')!r} in --adapters-dir is left out: " in complaint
    assert reason in complaint
    assert (refusal.name, reason in refusal.reason) == ("bad", True)
    with closing(Registry(None)) as registry, pytest.raises(ConfigError, match="adapter 'bad' at "):
        catalog(registry, reader, adapters_dir, device_bytes=100_000).add_at_start(
            given.items(), lambda: None, found=["good"]
        )


def test_a_folder_found_whose_name_cannot_be_an_adapters_is_left_out(adapters_dir: Path, reader: AdapterReader) -> None:
    given = {name: write_adapter(adapters_dir / name) for name in ("two words", "base")}
    with closing(Registry(None)) as registry:
        made = catalog(registry, reader, adapters_dir)
        complaints = made.add_at_start(given.items(), lambda: None, found=given)
        assert made.all() == []
    assert ["two words" in complaints[0], "base" in complaints[1]] == [True, True]


def test_a_folder_damaged_since_it_was_served_is_left_out_until_it_is_repaired(
    adapters_dir: Path, reader: AdapterReader, tmp_path: Path
) -> None:
    given = {"good": adapters_dir / "good"}

    def start() -> tuple[list[str], list[str]]:
        with closing(Registry(tmp_path / "registry.db")) as registry:
            made = catalog(registry, reader, adapters_dir)
            complaints = made.add_at_start(given.items(), lambda: None, found=given)
            return complaints, [info.name for info in made.all()]

    assert start() == ([], ["good"])
    truncated(adapters_dir / "good")
    complaints, names = start()
    assert (len(complaints), names) == (1, [])
    write_adapter(adapters_dir / "good")
    assert start() == ([], ["good"])


def remembered(registry: Path, reader: AdapterReader, folder: Path, *roots: Path) -> tuple[list[str], list[str]]:
    """Returns complaints and names at the start of a server without adapters, after one that was started with
    `folder`."""
    with closing(Registry(registry)) as before:
        catalog(before, reader, folder.parent).add_at_start([("voice", folder)], lambda: None)
    with closing(Registry(registry)) as after:
        made = catalog(after, reader, *roots)
        return made.add_at_start([], lambda: None), [info.name for info in made.all()]


def test_adapters_of_earlier_runs_are_registered_again_from_allowed_folders(
    adapters_dir: Path, reader: AdapterReader, tmp_path: Path
) -> None:
    assert remembered(tmp_path / "r.db", reader, adapters_dir / "good", adapters_dir) == ([], ["voice"])
    for roots in ((), (tmp_path / "elsewhere",)):
        (complaint,), names = remembered(tmp_path / "r.db", reader, adapters_dir / "good", *roots)
        assert names == []
        assert str(adapters_dir / "good") in complaint
        assert "--allow-adapter-path" in complaint


def test_adapters_of_another_base_model_are_left_out_until_it_is_served_again(
    adapters_dir: Path, reader: AdapterReader, tmp_path: Path
) -> None:
    given, other = {"good": adapters_dir / "good"}, plan_of(FIELDS | {"hidden_size": 128})

    def start(base: str, reader: AdapterReader, modules: dict[str, Path]) -> tuple[list[str], list[str]]:
        with closing(Registry(tmp_path / "registry.db", base)) as registry:
            made = catalog(registry, reader, adapters_dir)
            complaints = made.add_at_start(modules.items(), lambda: None, found=modules)
            return complaints, [info.name for info in made.all()]

    assert start("one", reader, given) == ([], ["good"])
    with closing(AdapterReader(other, lambda call: call())) as others:
        for modules in (given, {}, given, {}):  # found in the folder, and remembered
            complaints, names = start("another", others, modules)
            assert ("shape" in complaints[0], names) == (True, []), complaints
    assert start("one", reader, {}) == ([], ["good"])
    with closing(Registry(tmp_path / "registry.db", "one")) as registry:  # it was inspected and is known again
        assert (registry.knows_facts("good"), registry.all()[0].state) == (True, "active")


def test_a_row_with_another_adapters_path_is_not_trusted(
    adapters_dir: Path, reader: AdapterReader, tmp_path: Path
) -> None:
    """The files have the same sizes and times, so only the path shows that the row is of another adapter."""
    other = write_adapter(tmp_path / "other", {"lora_alpha": 9})
    for file in other.iterdir():
        stat = (adapters_dir / "good" / file.name).stat()
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    given = [("good", adapters_dir / "good")]
    with closing(Registry(tmp_path / "r.db")) as registry:
        catalog(registry, reader, tmp_path).add_at_start(given, lambda: None)
        right = registry.all()[0]
    with closing(sqlite3.connect(tmp_path / "r.db")) as vandal, vandal:
        vandal.execute("UPDATE adapters SET path = ?, digest = ?", (str(other), "0" * 64))
    with closing(Registry(tmp_path / "r.db")) as registry:
        made = catalog(registry, reader, tmp_path)
        assert made.add_at_start(given, lambda: None) == []
        assert made.all() == [replace(right, created_s=made.all()[0].created_s)]


def test_an_unloaded_folder_stays_unloaded_over_restarts_until_its_files_change_or_it_is_named(
    adapters_dir: Path, reader: AdapterReader, tmp_path: Path
) -> None:
    given = {"good": adapters_dir / "good"}

    def start(found: dict[str, Path], named: dict[str, Path]) -> tuple[Catalog, list[str]]:
        made = catalog(registry, reader, adapters_dir)
        return made, made.add_at_start((found | named).items(), lambda: None, found=found)

    with closing(Registry(tmp_path / "r.db")) as registry:
        made, _ = start(given, {})
        asyncio.run(made.unload("good"))
    for base in ("any", "another", "any"):
        with closing(Registry(tmp_path / "r.db", base)) as registry:
            made, (complaint,) = start(given, {})
            assert made.all() == []
            assert f"{str(given['good'])!r} in --adapters-dir is left out: it was unloaded or deleted" in complaint
            assert made.refused.get("good") is not None
    with closing(Registry(tmp_path / "r.db")) as registry:
        made, complaints = start({}, given)
        assert ([info.state for info in made.all()], complaints) == (["active"], [])
    with closing(Registry(tmp_path / "r.db")) as registry:
        made, _ = start(given, {})
        asyncio.run(made.unload("good"))
        write_adapter(adapters_dir / "good", {"lora_alpha": 9})
        made, complaints = start(given, {})
        assert ([info.name for info in made.all()], complaints) == (["good"], [])


def test_what_is_known_of_an_unloaded_folder_goes_with_it(
    adapters_dir: Path, reader: AdapterReader, tmp_path: Path
) -> None:
    given = {"good": adapters_dir / "good"}
    with closing(Registry(tmp_path / "r.db")) as registry:
        made = catalog(registry, reader, adapters_dir)
        made.add_at_start(given.items(), lambda: None, found=given)
        asyncio.run(made.unload("good"))
        assert catalog(registry, reader).add_at_start([], lambda: None) == []
        assert len(registry.all()) == 1, "a start without this --adapters-dir forgets nothing"
        shutil.rmtree(adapters_dir / "good")
        assert catalog(registry, reader, adapters_dir).add_at_start([], lambda: None) == []
        assert registry.all() == []


def test_adapters_are_reported_in_their_order_whichever_inspection_ends_first(
    adapters_dir: Path, reader: AdapterReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    kinds = {"a": ["q_proj", "x"], "b": "nothing", "c": ["q_proj", "y"], "d": "nothing", "e": ["q_proj", "z"]}
    given = {name: write_adapter(adapters_dir / name, {"target_modules": kind}) for name, kind in kinds.items()}
    has_ended, inspect = Event(), reader.inspect

    def first_waits(folder: Path) -> Inspection:
        if os.path.samefile(folder, given["a"]):
            has_ended.wait(5.0)  # with one thread in vain
        try:
            return inspect(folder)
        finally:
            has_ended.set()

    monkeypatch.setattr(reader, "inspect", first_waits)
    with closing(Registry(None)) as registry:
        made = catalog(registry, reader, adapters_dir)
        complaints = made.add_at_start(given.items(), lambda: None, found=given)
        assert [info.name for info in made.all()] == [*"ace"]
        assert [info.name for info in registry.all()] == [*"ace"]
    assert [Path(complaint.split("'")[1]).name for complaint in complaints] == ["b", "d"]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["adapter a", "adapter c", "adapter e"]
    with closing(Registry(None)) as registry, pytest.raises(ConfigError, match="adapter 'b' at "):
        catalog(registry, reader, adapters_dir).add_at_start(given.items(), lambda: None)


def test_a_second_start_inspects_only_what_has_changed_and_says_the_same(
    adapters_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("caraserve").propagate = True
    monkeypatch.setattr(inspections, "_SETTLED_NS", 0)
    given = {name: write_adapter(adapters_dir / name, {"target_modules": ["q_proj", "x"]}) for name in "ab"}
    inspected: list[Path] = []

    def inspect(folder: Path, *arguments: Any, **options: Any) -> AdapterSpec:
        inspected.append(folder.resolve())
        return inspect_adapter(folder, *arguments, **options)

    def start() -> tuple[list[tuple[str, str]], list[str]]:
        caplog.clear()
        known = Inspections(tmp_path / "inspections.sqlite")
        with closing(Registry(None)) as registry:
            with closing(AdapterReader(SPEC, lambda call: call(), inspections=known)) as reader:
                made = catalog(registry, reader, adapters_dir)
                made.add_at_start(given.items(), lambda: None)
            return [(info.name, info.digest) for info in made.all()], [one.getMessage() for one in caplog.records]

    monkeypatch.setattr("caraserve.lora.adapter_reader.inspect_adapter", inspect)
    first = start()
    assert len(inspected) == len(first[1]) == 2
    assert start() == first
    assert len(inspected) == 2
    write_adapter(given["b"], {"lora_alpha": 9})
    assert start() != first
    assert inspected[2:] == [given["b"]]


def test_damaged_rows_are_among_the_complaints(adapters_dir: Path, reader: AdapterReader, tmp_path: Path) -> None:
    with closing(Registry(tmp_path / "r.db")) as registry:
        catalog(registry, reader).add_at_start([("good", adapters_dir / "good")], lambda: None)
    with closing(sqlite3.connect(tmp_path / "r.db")) as vandal, vandal:
        vandal.execute("UPDATE adapters SET rank = 'eight'")
    with closing(Registry(tmp_path / "r.db")) as registry:
        (complaint,) = catalog(registry, reader).add_at_start([], lambda: None)
    assert "rank is 'eight'" in complaint


def load(made: Catalog, path: Path) -> AdapterInfo:
    return asyncio.run(made.load("new", str(path), inplace=False))


def test_run_time_loads_are_accepted_only_from_allowed_folders(adapters_dir: Path, reader: AdapterReader) -> None:
    with closing(Registry(None)) as registry:
        assert load(catalog(registry, reader, adapters_dir), adapters_dir / "good").name == "new"
        with pytest.raises(AdapterRejected, match="lies outside"):
            load(catalog(registry, reader, adapters_dir / "good"), adapters_dir)
        with pytest.raises(Forbidden, match="--allow-adapter-path ROOT"):
            load(catalog(registry, reader), adapters_dir / "good")


def test_a_folder_that_cannot_be_read_any_more_is_logged_once(
    adapters_dir: Path, reader: AdapterReader, caplog: pytest.LogCaptureFixture
) -> None:
    results: Queue[HostAdapter | CaraServeError] = Queue()
    folder = AdapterFolder(adapters_dir / "good")

    def read() -> list[str]:
        reader.read(folder, aligned_bytes(_MIB), results.put)
        results.get(timeout=30)
        return [record.getMessage() for record in caplog.records]

    assert read() == []
    truncated(adapters_dir / "good")
    (message,) = read()
    assert read() == [message]
    assert "adapters/good' cannot be used: adapter_model.safetensors is not a valid" in message
    write_adapter(adapters_dir / "good")
    assert read() == [message]
    truncated(adapters_dir / "good")
    assert read() == [message, message]
