"""An `AdapterManager` with a fake disk, a fake backend and a clock. Loads end when the test ends them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.config import LOADING_MODES
from caraserve.core.backend import Limits
from caraserve.core.batch import Batch, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.cpu.shared_memory import Arena
from caraserve.errors import CaraServeError
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora.adapter import Adapter, RemoteSource
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.manager import AdapterManager
from caraserve.lora.start_policy import StartPolicy
from caraserve.model.dtype import Dtype


class Device:
    """A backend whose copies end when the test ends them."""

    limits = Limits(
        num_blocks=1, block_tokens=16, num_slots=1, adapter_slots=9, max_step_tokens=1, max_context=1, embedding_size=1
    )

    def __init__(self, streamed_batches: int) -> None:
        self.limits = replace(self.limits, streamed_batches=streamed_batches)
        self.bound: dict[int, str] = {}
        self.copies: list[Callable[[], None]] = []
        self.failures: dict[str, Exception] = {}  # of copies, by digest

    host_memory = np.zeros(0, np.uint8)

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
        first_layer: int = 0,
    ) -> None:
        self.bound[slot] = adapter.spec.digest
        self.copies.append(lambda: done(self.failures.pop(adapter.spec.digest, None)))

    def extend_load(self, slot: int, layers: int) -> None:
        assert slot in self.bound

    def break_load(self, slot: int, cause: Exception) -> None:
        raise AssertionError("all comes here")

    def recall(self, slot: int) -> None:
        raise AssertionError("no plan waits here")

    def resize_kv(self, blocks: int, done: Callable[[Exception | None], None]) -> None:
        raise AssertionError("KV blocks have memory of their own here")

    def device_bytes(self, spec: AdapterSpec) -> int:
        return spec.num_bytes

    def release_vectors(self, slot: int) -> None:
        raise AssertionError("no request has vectors")

    def unload_adapter(self, slot: int) -> None:
        del self.bound[slot]

    def launch(self, plan: Batch, done: Callable[[StepResult | Exception], None]) -> None:
        raise AssertionError("manager launches nothing")

    def close(self) -> None:
        pass


class Costs:
    def prefill_ms(self, tokens: int, rank: int) -> float:
        return 1.0

    def cpu_lora_ms(self, tokens: int, rank: int, targets: str) -> float:
        return 1.0


COSTS = Costs()


class CacheTiers:
    """An `AdapterManager` with a fake disk and a clock, whose loads end when `settle` is called."""

    def __init__(
        self, names: Iterable[str] = (), device_bytes: int = 100, host_bytes: int = 1000, streamed_batches: int = 0
    ) -> None:
        """`names`: of adapters that are there already."""
        self.device, self.now_s = Device(streamed_batches), 0.0
        self.coming: dict[str, Callable[[], None]] = {}  # the first of two layers, of reads under way
        self.disk: dict[str, int | CaraServeError] = {}
        self.reads: list[Callable[[], None]] = []
        self.arena = Arena(aligned_bytes(host_bytes))
        self.manager = AdapterManager(
            self.device,
            MemoryBudget(self.device.limits, device_bytes),
            self.arena,
            self._read,
            lambda call: call(),
            lambda: self.now_s,
            StartPolicy(
                LOADING_MODES["pipelined" if streamed_batches else "overlapped"], 1, link_bytes_per_s=100.0, costs=COSTS
            ),
        )
        for name in names:
            self.add(name)

    def add(self, name: str, size: int = 40) -> None:
        self.disk[name] = size
        self.manager.register(name, name, AdapterFolder(Path(name)), size)

    def ask(self, name: str) -> Adapter:
        """Submits and admits a request."""
        version = self.manager.pin(name)
        self.manager.acquire(version)
        return version

    def end(self, version: Adapter) -> None:
        self.manager.release(version)
        self.manager.unpin(version)

    def settle(self) -> None:
        while self.reads or self.device.copies:
            (self.reads or self.device.copies).pop(0)()
        self.manager.check()

    def serve(self, name: str) -> None:
        """Serves one request from its start to its end."""
        version = self.ask(name)
        self.settle()
        assert self.device.bound[version.slot] == name
        self.end(version)

    def on_device(self) -> set[str]:
        return {version.digest for version in self.manager.on_device()}

    def _read(
        self,
        source: AdapterFolder | RemoteSource,
        into: NDArray[np.uint8],
        done: Callable[[HostAdapter | CaraServeError], None],
        layers_arrived: Callable[[HostAdapter, int], None],
    ) -> None:
        name = source.name if isinstance(source, AdapterFolder) else source.digest
        found = self.disk[name]
        if isinstance(found, CaraServeError):
            self.reads.append(lambda: done(found))
            return
        image = HostAdapter(AdapterSpec(name, Dtype.F32, 8, ("q_proj",), (found // 2, found), ()), into)
        self.coming[name] = lambda: layers_arrived(image, 1)

        def finish() -> None:
            del self.coming[name]
            done(image)

        self.reads.append(finish)
