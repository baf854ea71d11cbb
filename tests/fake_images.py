"""Adapters for the fake backend of hashes: their bytes, and a fake disk or network to read them from."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.model.dtype import Dtype

ADAPTER_BYTES = 100
BASE = 0


def adapter_key(digest: str | None) -> int:
    """Returns the number that an adapter adds to the hash, the same in every process."""
    return BASE if digest is None else int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=7).digest())


def host_adapter(digest: str, into: NDArray[np.uint8], layers: int) -> HostAdapter:
    """Returns an adapter whose bytes are not written yet."""
    ends = tuple(ADAPTER_BYTES * (layer + 1) // layers for layer in range(layers))
    return HostAdapter(AdapterSpec(digest, Dtype.F32, 8, ("q_proj",), ends, ()), into)


def fill(image: HostAdapter, layers: int) -> None:
    """Writes the first layers."""
    image.data[: image.spec.layer_ends[layers - 1]] = adapter_key(image.spec.digest) % 256


def is_whole(image: HostAdapter) -> bool:
    return bool((image.data == adapter_key(image.spec.digest) % 256).all())


def is_there(image: HostAdapter) -> bool:
    """Returns whether an image is whole, or was read whole and is wrong."""
    return bool((image.data | 1 == adapter_key(image.spec.digest) % 256 | 1).all())


class FakeReader:
    """A disk or network where a folder's path is its adapter's digest. The test delivers layers, and ends reads."""

    def __init__(self, layers: int = 1) -> None:
        self.executor: Executor = ThreadPoolExecutor(1)
        self.reads: list[Callable[[bool], None]] = []
        self.coming: list[Callable[[], None]] = []  # of each read, the next layers
        self.checks: list[Callable[[], None]] = []  # of digests that are computed beside the first use
        # Whether the next image has other bytes than its digest says; None: every digest is computed before its use.
        self.is_wrong: Callable[[], bool] | None = None
        self._layers = layers

    def read(
        self,
        folder: AdapterFolder,
        into: NDArray[np.uint8],
        done: Callable[[HostAdapter | CaraServeError], None],
        came: Callable[[HostAdapter, int], None],
    ) -> None:
        image, there = host_adapter(str(folder.path), into, self._layers), 0
        into[:] = 255

        def come() -> None:
            nonlocal there
            there += 1
            fill(image, there)
            came(image, there)
            if there == self._layers:
                self.coming.remove(come)

        def end(ok: bool) -> None:
            if come in self.coming:
                self.coming.remove(come)
            if not ok:
                done(AdapterRejected("the disk failed"))
                return
            fill(image, self._layers)
            if self.is_wrong is None:
                done(image)
                return
            is_wrong = there == 0 and self.is_wrong()
            image.data[:] ^= is_wrong
            done(replace(image, is_checked=False))

        self.coming.append(come)
        self.reads.append(end)

    def check(self, image: HostAdapter, done: Callable[[HostAdapter], None]) -> None:
        def end() -> None:
            digest = image.spec.digest if is_whole(image) else "of other bytes"
            done(HostAdapter(replace(image.spec, digest=digest), image.data))

        self.checks.append(end)

    def close(self) -> None:
        self.executor.shutdown()
