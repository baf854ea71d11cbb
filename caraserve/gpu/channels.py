"""What everything reaches the device through, in one hand. Level 1."""

from dataclasses import dataclass

from caraserve.gpu.batch import Capacity, DeviceBatch, HostBatch
from caraserve.gpu.copier import Copier
from caraserve.gpu.decoder import Decoder
from caraserve.gpu.driver import Driver
from caraserve.gpu.results import ResultBlocks, Waiter
from caraserve.gpu.ring import Ring
from caraserve.gpu.timeline import Timelines
from caraserve.gpu.transfers import LinkQueue


@dataclass(frozen=True, slots=True)
class Channels:
    """The launching thread's alone."""

    driver: Driver
    timelines: Timelines
    ring: Ring
    queue: LinkQueue
    copier: Copier


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What a lane of passes has to itself."""

    capacity: Capacity
    batch: DeviceBatch
    host: HostBatch
    decoder: Decoder
    results: ResultBlocks
    waiter: Waiter
