"""An adapter's record: where its weights are, which requests need it, and counts of the caches' events."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.start_policy import NO_PREFILL, AwaitedPrefill, ExpectedLayers
from caraserve.telemetry.prometheus import family

_AGAIN_S = 5.0  # from a failure to the next prefetch; an admitted request tries at once
_HALF_LIFE_S = 60.0  # of the admission rate, by which eviction chooses


class AdapterTier(Enum):
    """The place nearest to the device where an adapter's weights are, or are on their way to."""

    DISK = "disk"
    READING = "reading"  # disk or another instance → host
    HOST = "host"
    STREAMING = "streaming"  # another instance → host → device, a layer at a time
    COPYING = "copying"  # host → device
    DEVICE = "device"
    FAILED = "failed"  # could not be read; the next request tries again


TIER_CHANGES: dict[AdapterTier, frozenset[AdapterTier]] = {
    AdapterTier.DISK: frozenset({AdapterTier.READING, AdapterTier.HOST}),
    AdapterTier.READING: frozenset({AdapterTier.HOST, AdapterTier.STREAMING, AdapterTier.FAILED}),
    AdapterTier.HOST: frozenset({AdapterTier.COPYING, AdapterTier.DISK, AdapterTier.FAILED}),
    AdapterTier.STREAMING: frozenset({AdapterTier.COPYING, AdapterTier.READING, AdapterTier.FAILED}),
    AdapterTier.COPYING: frozenset({AdapterTier.DEVICE, AdapterTier.HOST, AdapterTier.FAILED}),
    AdapterTier.DEVICE: frozenset({AdapterTier.HOST, AdapterTier.DISK}),
    AdapterTier.FAILED: frozenset({AdapterTier.READING, AdapterTier.HOST, AdapterTier.DISK}),
}


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """The source of an adapter that no local folder has: other instances, or this instance's disk cache of
    downloads."""

    digest: str


Done: TypeAlias = Callable[[HostAdapter | CaraServeError], None]
LayersArrived: TypeAlias = Callable[[HostAdapter, int], None]


class UploadSource(ABC):
    """The source of an adapter that a client is still uploading. Its digest is known when all of it has arrived."""

    @abstractmethod
    def read(self, into: NDArray[np.uint8], done: Done, layers_arrived: LayersArrived) -> None:
        """Reads the adapter as `ReadAdapter` does."""


class CombinedSource(ABC):
    """The source of an adapter that is made of other adapters' images."""

    @abstractmethod
    def read(self, into: NDArray[np.uint8], done: Done, layers_arrived: LayersArrived) -> None:
        """Reads the adapter as `ReadAdapter` does."""


Source: TypeAlias = AdapterFolder | RemoteSource | UploadSource | CombinedSource


ReadAdapter: TypeAlias = Callable[[Source, NDArray[np.uint8], Done, LayersArrived], None]
"""Reads an adapter into an extent of the arena, on another thread, and calls `Done` on the event loop. Of a download,
`LayersArrived` is called there before with the image and a number of layers: its first ones, which are verified and do
not change any more; the bytes after them may not be read yet."""

CheckDigest: TypeAlias = Callable[[HostAdapter, Callable[[HostAdapter], None]], None]
"""Computes the digest of an image that is not `is_checked`, on another thread, and calls back on the event loop with
the image as it is, which may have another digest."""


@dataclass(slots=True)
class PartialImage:
    """An adapter image that is being downloaded since `began_s`: its first `layers` layers have arrived and may be
    read. The last layer is never counted, because it arrives with the end of the download."""

    image: HostAdapter
    began_s: float
    layers: int = 0


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter, identified by its digest, or by a random one until its upload is complete.

    `pins`: its unfinished requests. `users`: those of them that are admitted. `image_pins`: side batches and uploads
    under way that may read its image.
    """

    digest: str
    source: Source
    num_bytes: int  # of its image in the host cache
    tier: AdapterTier = AdapterTier.DISK
    pins: int = 0
    users: int = 0
    image_pins: int = 0
    names: dict[str, Source] = field(default_factory=dict)  # that stand for it, each with where its files are
    pinned: str | None = None  # in which cache it stays, one of `PINS`
    slot: int = BASE_ADAPTER_SLOT
    device_bytes: int = 0
    is_checked: bool = True  # False while the digest of its image's bytes is computed beside its use
    spec: AdapterSpec | None = None  # known once its image has been in the host cache
    partial: PartialImage | None = None  # while it is downloaded, once layers have arrived
    makes_room: bool = False  # whether it makes room for others: it is copied again when it is complete
    groups: tuple[ExpectedLayers, ...] = ()  # expected on the device while STREAMING or COPYING
    prefill: AwaitedPrefill = NO_PREFILL  # of the request that it was last acquired for
    error: CaraServeError | None = None
    again_s: float = 0.0  # after a failure: when it may be prefetched again
    copy_error: Exception | None = None  # of a copy that failed during a side batch or a download
    asked_s: float = 0.0  # when the load under way began
    rate: float = 0.0  # of admissions: their number, decayed with a half-life of 60 s
    rated_s: float = 0.0

    @property
    def content_digest(self) -> str | None:
        """The digest of its bytes; None until its upload is complete."""
        if self.spec is not None and self.spec.digest:
            return self.spec.digest
        return None if isinstance(self.source, UploadSource) else self.digest

    @property
    def is_leaving(self) -> bool:
        """Whether the incomplete adapter is unloaded from the device as soon as its side batches have ended."""
        return self.tier is AdapterTier.STREAMING and (self.makes_room or self.error is not None)

    @property
    def takes_requests(self) -> bool:
        """Whether requests may start or continue with it on the device: not while it is being unloaded, and not after
        its copy has failed, because its image may then be evicted."""
        return self.copy_error is None and not self.is_leaving

    @property
    def needs_image(self) -> bool:
        """Whether its image must stay in the host cache: it is being copied to the device, or will be, or is read by
        CPU workers or an upload, or for its digest."""
        is_read = self.tier in (AdapterTier.STREAMING, AdapterTier.COPYING) or self.image_pins > 0
        return is_read or not self.is_checked or (self.tier is AdapterTier.HOST and self.users > 0)

    def read_from(self, source: Source | None) -> None:
        """Changes where it is read from; None: it is not read any more. A folder is kept as long as it is read."""
        old = self.source
        if isinstance(source, AdapterFolder):
            source.add_user()
        if isinstance(old, AdapterFolder):
            old.remove_user()
        if source is not None:
            self.source = source

    def move_to(self, tier: AdapterTier) -> None:
        """Moves to `tier`. Raises AssertionError for a change that is not in `TIER_CHANGES`."""
        if tier not in TIER_CHANGES[self.tier]:
            raise AssertionError(f"adapter {self.digest[:12]}: {self.tier.name} cannot become {tier.name}")
        self.tier = tier

    def fail(self, error: CaraServeError, now_s: float) -> None:
        """Records that its weights could not be read or copied."""
        self.error, self.again_s = error, now_s + _AGAIN_S
        self.move_to(AdapterTier.FAILED)

    def may_be_read_ahead(self, now_s: float) -> bool:
        """Returns whether it may be prefetched: it is only on disk, and no read has failed within the last 5 s."""
        return self.tier is AdapterTier.DISK or (self.tier is AdapterTier.FAILED and now_s >= self.again_s)

    def rate_at(self, now_s: float) -> float:
        """Returns the number of its admissions, each weighted by half for every 60 s since then."""
        return float(self.rate * 0.5 ** ((now_s - self.rated_s) / _HALF_LIFE_S))

    def count_admission(self, now_s: float) -> None:
        """Adds one admission to the rate."""
        self.rate, self.rated_s = self.rate_at(now_s) + 1.0, now_s


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load to the device that has ended, from the request that needed it; times of the monotonic clock."""

    name: str  # one of the adapter's; empty if it has none any more
    began_s: float
    ended_s: float
    succeeded: bool


@dataclass(slots=True)
class CacheCounters:
    """Hits, misses and evictions since the start. The device cache is looked up when a request is admitted, the host
    cache when an adapter that is not on the device is needed there."""

    device_hits: int = 0
    device_misses: int = 0
    host_hits: int = 0
    disk_reads: int = 0  # misses of the host cache: read from disk or another instance, prefetches included
    device_evictions: int = 0
    host_evictions: int = 0

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metrics, with `labels` on every sample."""
        for name, text, device, host in (
            ("hits", "Adapters wanted in a cache and found there.", self.device_hits, self.host_hits),
            ("misses", "Adapters wanted in a cache and not found there.", self.device_misses, self.disk_reads),
            ("evictions", "Adapters evicted from a cache.", self.device_evictions, self.host_evictions),
        ):
            samples = [(f'tier="device",{labels}', device), (f'tier="host",{labels}', host)]
            yield family(f"caraserve:adapter_cache_{name}_total", "counter", text, samples)


def too_large(num_bytes: int, budget_bytes: int, flag: str) -> AdapterRejected:
    """Returns the error for an adapter that is larger than a cache."""
    return AdapterRejected(f"the adapter takes {num_bytes} bytes, more than {flag} {budget_bytes}")


def files_changed() -> AdapterRejected:
    """Returns the error for an adapter whose files are others now than when it was loaded."""
    return AdapterRejected("the adapter's files have changed since it was loaded; load it again")


def other_bytes(digest: str) -> AdapterRejected:
    """Returns the error for requests that were computed with bytes that turned out not to have their adapter's
    digest."""
    return AdapterRejected(
        f"the adapter's files have other bytes than {digest}, with which it was loaded; load it again"
    )
