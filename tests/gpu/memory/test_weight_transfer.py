"""Weights on their way to the device: every byte arrives, whatever the device runs when, and threads always end.

The device is emulated: a copy runs when a thread waits for it, so a buffer that is overwritten too early shows."""

import json
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from caraserve.errors import ConfigError, ModelLoadError
from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.memory.weight_transfer import TransferFigures, WeightTransfer
from caraserve.model.folder_reader import FolderReader, StoredTensor
from caraserve.model.safetensors_reader import TensorFile
from tests.gpu.host_device import host_device
from tests.gpu.host_driver import HostDriver

SPAN_BYTES = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 48), (7,), (1, 64), (33, 5), (128,), (50, 70))  # one span, exact spans, many spans


def values(dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns tensors by name, with values that other dtypes round, infinity and signed zeros."""
    generator = torch.Generator().manual_seed(0)
    made = {f"t{at}": 300.0 * torch.randn(shape, generator=generator) for at, shape in enumerate(SHAPES)}
    made["t1"][:3] = torch.tensor([float("inf"), -0.0, 1e-7])
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint of two files, neighbours in different ones."""
    names = list(tensors)
    for part in range(2):
        save_file({name: tensors[name] for name in names[part::2]}, folder / f"part{part}.safetensors")
    index = {name: f"part{at % 2}.safetensors" for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


class LoadCase:
    """A checkpoint, and an emulated device to load it to. It must be left with no thread, stream or pinned memory."""

    def __init__(self, folder: Path, dtype: torch.dtype, seed: int = 0) -> None:
        self.folder, self.tensors = folder, values(dtype)
        write(folder, self.tensors)
        self.device, self.driver = host_device(seed=seed)

    def stored(self, checkpoint: FolderReader) -> list[StoredTensor]:
        return [checkpoint.find(name, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def load(
        self,
        kept: torch.dtype,
        threads: int,
        wrap: Callable[[StoredTensor], StoredTensor] = lambda tensor: tensor,
        each: Callable[[str], None] = lambda name: None,
    ) -> tuple[dict[str, Tensor], TransferFigures]:
        """Fills tensors of dtype `kept`; calls `each` after each."""
        found = {}
        with FolderReader(self.folder) as checkpoint:
            stored = [wrap(tensor) for tensor in self.stored(checkpoint)]
            with WeightTransfer(self.device, stored, threads=threads, span_bytes=SPAN_BYTES) as transfer:
                for name, tensor in self.tensors.items():
                    found[name] = torch.full(tensor.shape, float("nan"), dtype=kept)
                    transfer.fill(name, found[name])
                    each(name)
                return found, transfer.figures()

    def check_at_rest(self) -> None:
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("caraserve-weights")] == []
        assert (self.driver._registered, self.driver._streams) == ({}, {})


@pytest.fixture
def case(tmp_path: Path) -> Iterator[LoadCase]:
    made = LoadCase(tmp_path, torch.bfloat16)
    yield made
    made.check_at_rest()


@pytest.mark.parametrize("kept", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_every_byte_arrives_and_is_rounded_once(tmp_path: Path, stored: torch.dtype, kept: torch.dtype) -> None:
    for seed, threads in enumerate((1, 2, 5)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = LoadCase(folder, stored, seed)
        found, _ = case.load(kept, threads)
        for name, tensor in case.tensors.items():
            bits = torch.int32 if kept is torch.float32 else torch.int16
            assert torch.equal(found[name].view(bits), tensor.to(kept).view(bits)), (name, seed)
        case.check_at_rest()


def test_a_buffer_is_not_overwritten_before_its_copy_has_run(tmp_path: Path) -> None:
    """The device runs copies as late as it can, and a tensor has ten times as many spans as there are buffers."""
    case = LoadCase(tmp_path, torch.float32)
    case.tensors = {"big": torch.arange(40 * SPAN_BYTES // 4, dtype=torch.float32)}
    write(tmp_path, case.tensors)
    found, _ = case.load(torch.float32, threads=2)
    assert torch.equal(found["big"], case.tensors["big"])


def test_memory_freed_by_work_that_has_not_run_is_not_written_yet(case: LoadCase) -> None:
    """A tensor's memory may have been another's, which the device still reads."""
    log: list[str] = []
    case.device = replace(case.device, synchronize=lambda: log.append("device is idle"))
    copy = case.driver.copy_to_device

    def watched(*arguments: Any) -> None:
        log.append("copy")
        copy(*arguments)

    case.driver.copy_to_device = watched  # type: ignore[method-assign]
    case.load(torch.bfloat16, 3, each=log.append)
    for name in list(case.tensors)[:-1]:
        assert log[log.index(name) + 1] == "device is idle"


def test_a_filled_tensor_can_be_freed(case: LoadCase) -> None:
    with (
        FolderReader(case.folder) as checkpoint,
        WeightTransfer(case.device, case.stored(checkpoint), threads=3, span_bytes=SPAN_BYTES) as transfer,
    ):
        for name, tensor in case.tensors.items():
            target = torch.empty(tensor.shape)
            last = weakref.ref(target)
            transfer.fill(name, target)
            del target
            assert last() is None


class Watched(TensorFile):
    """Another file's tensors, each read of which is seen first."""

    def __init__(self, file: TensorFile, see: Callable[[str], None]) -> None:
        self._file, self._see = file, see

    def read_into(self, name: str, target: memoryview, start: int) -> None:
        self._see(name)
        self._file.read_into(name, target, start)


def watching(see: Callable[[str], None]) -> Callable[[StoredTensor], StoredTensor]:
    return lambda tensor: replace(tensor, file=Watched(tensor.file, see))


def test_threads_read_ahead_of_the_first_tensor_and_not_further_than_a_piece_each(case: LoadCase) -> None:
    reads = threading.Semaphore(0)
    read: list[str] = []

    def see(name: str) -> None:
        read.append(name)
        reads.release()

    with FolderReader(case.folder) as checkpoint:
        stored = [watching(see)(tensor) for tensor in case.stored(checkpoint)]
        with WeightTransfer(case.device, stored, threads=3, span_bytes=SPAN_BYTES):
            assert all(reads.acquire(timeout=30.0) for _ in range(3))
            assert sum(case.driver._registered.values()) <= max(2 << 20, 6 * SPAN_BYTES)  # whole huge pages
    assert read == ["t0"] * 3


def test_a_file_cut_short_ends_the_load_with_its_name_and_the_tensors(case: LoadCase) -> None:
    path = case.folder / "part1.safetensors"

    def cut(name: str) -> None:
        if name == "t2":
            os.truncate(path, path.stat().st_size - 100)

    with pytest.raises(ModelLoadError, match=r"^part1\.safetensors was cut short while tensor t5 was being read$"):
        case.load(torch.bfloat16, 2, each=cut)


def test_a_file_that_changes_during_the_load_is_an_error(case: LoadCase) -> None:
    path = case.folder / "part0.safetensors"
    with pytest.raises(ModelLoadError, match=r"^part0\.safetensors was changed while it was being read; try again$"):
        case.load(torch.bfloat16, 2, each=lambda name: os.utime(path, ns=(0, 0)))


def test_a_thread_reads_its_next_piece_while_its_last_one_is_copied(case: LoadCase) -> None:
    """The device copies nothing until a thread waits for it."""
    pending: list[int] = []

    def see(name: str) -> None:
        if name == "t5":
            (stream,) = case.driver._streams.values()
            pending.append(len(stream.waiting))

    case.load(torch.bfloat16, 1, watching(see))
    assert pending[1] == 2  # the first span's copy, and the record after it


@pytest.mark.parametrize("name", ["t1", "t3", "t5"])
def test_an_interrupt_ends_all_threads(case: LoadCase, name: str) -> None:
    main = threading.get_ident()
    asked = threading.Event()

    def see(read: str) -> None:
        if read == name and not asked.is_set():
            asked.set()
            signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        case.load(torch.bfloat16, 3, watching(see))


def test_a_second_interrupt_leaves_no_thread_in_memory_that_is_freed(
    case: LoadCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, unregister = threading.Thread.join, HostDriver.unregister_host
    is_reading, may_read = threading.Event(), threading.Event()
    interrupts = [KeyboardInterrupt, KeyboardInterrupt]

    def see(name: str) -> None:
        if name == "t1":
            is_reading.set()
            may_read.wait(30.0)

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name.startswith("caraserve-weights"):
            if interrupts:
                raise interrupts.pop()
            may_read.set()
        join(thread, timeout)

    def first(name: str) -> None:
        assert is_reading.wait(30.0)
        raise KeyboardInterrupt

    def checked(driver: HostDriver, address: int) -> None:
        assert not any(thread.name.startswith("caraserve-weights") for thread in threading.enumerate())
        unregister(driver, address)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    monkeypatch.setattr(HostDriver, "unregister_host", checked)
    with pytest.raises(KeyboardInterrupt):
        case.load(torch.bfloat16, 3, watching(see), first)
    assert not interrupts


def test_an_interrupt_while_threads_are_started_ends_those_that_were(
    case: LoadCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name.endswith("-2"):
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.load(torch.bfloat16, 3)


def test_a_device_that_fails_ends_the_load(case: LoadCase) -> None:
    def fail(name: str) -> None:
        case.driver.failed = name == "t2"

    with pytest.raises(DriverError, match="the device has failed"):
        case.load(torch.bfloat16, 2, each=fail)


def test_memory_that_cannot_be_pinned_leaves_nothing_behind(case: LoadCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(driver: HostDriver, address: int, num_bytes: int) -> int:
        raise DriverError("out of memory")

    monkeypatch.setattr(HostDriver, "register_host", refuse)
    with pytest.raises(ConfigError, match=r"MiB of host memory, .* cannot be pinned \(out of memory\); free memory"):
        case.load(torch.bfloat16, 2)


def test_a_full_device_is_named_before_any_file_is_read(case: LoadCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with FolderReader(case.folder) as checkpoint:
        stored = case.stored(checkpoint)
        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.raises(ModelLoadError, match="the device has less than 256 B free"):
            WeightTransfer(case.device, stored, threads=2, span_bytes=SPAN_BYTES)


def test_tensors_filled_in_another_order_are_a_defect(case: LoadCase) -> None:
    with (
        FolderReader(case.folder) as checkpoint,
        WeightTransfer(case.device, case.stored(checkpoint), threads=1) as transfer,
        pytest.raises(AssertionError, match="t1"),
    ):
        transfer.fill("t1", torch.empty(7))


def test_the_figures_count_the_files_bytes(case: LoadCase) -> None:
    _, figures = case.load(torch.float32, 2)
    assert (figures.num_bytes, figures.threads) == (sum(2 * tensor.numel() for tensor in case.tensors.values()), 2)
    assert 0 < figures.read_share <= 1
    assert 0 <= figures.own_share <= 1


@pytest.mark.parametrize(
    ("read_share", "own_share", "disk_bytes", "limit"),
    [
        (0.9, 0.1, 12 * 10**9, "reading from disk"),
        (0.9, 0.1, 10**9, "reading from the page cache"),
        (0.9, 0.1, None, "reading from the page cache"),
        (0.3, 0.1, 0, "copying to the device"),
        (0.1, 0.8, 0, "allocating and converting on the device"),
    ],
)
def test_the_limit_is_what_took_most_of_the_time(
    read_share: float, own_share: float, disk_bytes: int | None, limit: str
) -> None:
    assert TransferFigures(13 * 10**9, 2.0, 8, read_share, own_share, disk_bytes).limit == limit


def test_the_figures_are_one_line() -> None:
    assert str(TransferFigures(13 * 10**9, 2.0, 8, 0.9, 0.1, 12 * 10**9)) == (
        "13.0 GB of weights at 6.5 GB/s, 12.0 GB of them from disk; limited by reading from disk (8 threads read for "
        "90% of the time)"
    )
