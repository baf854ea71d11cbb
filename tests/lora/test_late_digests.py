"""Adapters are read without computing their digest if their files have not changed since that was done; it is computed
beside the first use. Whatever happens to the files, no image passes for checked whose bytes have another digest."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora import adapter_reader, inspections
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.inspections import Inspections, full_stamp
from caraserve.lora.peft import read_adapter
from caraserve.lora.peft_fields import CONFIG_NAME
from tests.lora.folders import SPEC, read, tensor_name, tensors_for, write_adapter

Result = HostAdapter | CaraServeError


class Disk:
    """A reader and its inspections."""

    def __init__(self) -> None:
        self.known = Inspections()
        self.reader = AdapterReader(SPEC, lambda call: call(), inspections=self.known)

    def read(self, folder: Path, *, may_defer: bool = True) -> Result:
        results: Queue[Result] = Queue()
        self.reader.read(AdapterFolder(folder), aligned_bytes(1 << 20), results.put, may_defer=may_defer)
        return results.get(timeout=30)

    def image(self, folder: Path, **options: Any) -> HostAdapter:
        image = self.read(folder, **options)
        assert isinstance(image, HostAdapter)
        return image

    def checked(self, image: HostAdapter) -> HostAdapter:
        results: Queue[HostAdapter] = Queue()
        self.reader.check(image, results.put)
        return results.get(timeout=30)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(inspections, "_SETTLED_NS", 0)
    made = Disk()
    yield made
    made.reader.close()


@pytest.fixture
def folder(tmp_path: Path, disk: Disk) -> Path:
    """A folder that has been inspected."""
    made = write_adapter(tmp_path / "adapter")
    disk.reader.inspect(made)
    return made


def other_tensors() -> dict[str, Any]:
    tensors = tensors_for()
    tensors[tensor_name(1, "q_proj", "B")][0, 0] += 1
    return tensors


def test_the_digest_of_unchanged_files_is_computed_after_the_read(disk: Disk, folder: Path) -> None:
    first, expected = disk.image(folder), read(folder, SPEC)
    assert (first.is_checked, first.spec.digest, first.spec.chunks) == (False, expected.spec.digest, ())
    assert (first.data == expected.data).all()
    checked = disk.checked(first)
    assert (checked.is_checked, checked.spec) == (True, expected.spec)
    assert checked.data is first.data


def test_an_image_whose_digest_cannot_be_computed_counts_as_other_bytes(
    disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(adapter_reader, "identified", fail)
    assert disk.checked(disk.image(folder)).spec.digest == ""


def test_a_folder_that_was_not_inspected_is_known_from_its_first_read_on(disk: Disk, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    assert disk.image(folder).is_checked
    assert not disk.image(folder).is_checked


def test_what_was_only_read_is_inspected_before_it_is_served(disk: Disk, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {"target_modules": "nothing"})
    disk.image(folder)
    with pytest.raises(AdapterRejected, match="target_modules"):
        disk.reader.inspect(folder)


def test_a_caller_that_needs_the_digest_gets_a_checked_image(disk: Disk, folder: Path) -> None:
    assert disk.image(folder, may_defer=False).is_checked


def replaced(folder: Path) -> None:
    write_adapter(folder.with_name("new"), tensors=other_tensors())
    os.replace(folder.with_name("new") / TENSORS_NAME, folder / TENSORS_NAME)


def rewritten_with_its_old_times(folder: Path) -> None:
    path = folder / TENSORS_NAME
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def link_swapped(folder: Path) -> None:
    before = (folder / TENSORS_NAME).stat()
    other = write_adapter(folder.with_name("other"), tensors=other_tensors()) / TENSORS_NAME
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    (folder / TENSORS_NAME).unlink()
    (folder / TENSORS_NAME).symlink_to(other)


def configured_otherwise(folder: Path) -> None:
    path = folder / CONFIG_NAME
    before = path.stat()
    path.write_text(path.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, rewritten_with_its_old_times, link_swapped, configured_otherwise])
def test_changed_files_have_their_digest_computed_before_the_first_use(
    disk: Disk, folder: Path, change: Callable[[Path], None]
) -> None:
    before = disk.reader.inspect(folder).digest
    change(folder)
    image = disk.image(folder)
    assert image.is_checked
    assert image.spec == read(folder, SPEC).spec
    assert image.spec.digest != before


@pytest.mark.parametrize("what", ["on a network", "written just now"])
def test_files_whose_stamp_proves_nothing_have_their_digest_computed_before_every_use(
    disk: Disk, folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "on a network":
        monkeypatch.setattr(inspections, "_LOCAL_TYPES", {})
    else:
        monkeypatch.setattr(inspections, "_SETTLED_NS", 10**15)
    for _ in range(2):
        assert disk.image(folder).is_checked


def test_files_that_change_during_the_read_have_their_digest_computed_before_the_first_use(
    disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(*arguments: Any, **options: Any) -> HostAdapter:
        image = read_adapter(*arguments, **options)
        replaced(folder)
        return image

    before = disk.reader.inspect(folder).digest
    monkeypatch.setattr(adapter_reader, "read_adapter", read_slowly)
    image = disk.image(folder)
    assert (image.is_checked, image.spec.digest) == (True, before)


def test_other_bytes_than_those_inspected_are_found_and_known_next_time(disk: Disk, folder: Path) -> None:
    right, forged = read(folder, SPEC).spec, "0" * 64
    disk.known.note_digest(full_stamp(folder), forged)
    image = disk.image(folder)
    assert (image.is_checked, image.spec.digest) == (False, forged)
    assert disk.checked(image).spec == right
    image = disk.image(folder)
    assert (image.is_checked, image.spec) == (True, right)


def test_a_removed_folder_and_a_damaged_file_are_refused(disk: Disk, folder: Path) -> None:
    os.truncate(folder / TENSORS_NAME, 100)
    assert isinstance(disk.read(folder), AdapterRejected)
    folder.rename(folder.with_name("gone"))
    gone = disk.read(folder)
    assert isinstance(gone, AdapterRejected)
    assert "cannot be read" in gone.message
