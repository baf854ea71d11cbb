"""What everything reaches the device through, in one hand."""

from dataclasses import dataclass

from caraserve.gpu.driver.api import Driver
from caraserve.gpu.driver.streams import Timelines
from caraserve.gpu.forward.batch import Capacity, DeviceBatch, HostBatch
from caraserve.gpu.forward.decoder import Decoder
from caraserve.gpu.memory.copier import Copier
from caraserve.gpu.memory.link_queue import LinkQueue
from caraserve.gpu.memory.results import ResultBlocks, Waiter
from caraserve.gpu.memory.staging_ring import Ring


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
