"""Facts about the device on which the stages run."""

import resource
from dataclasses import dataclass
from pathlib import Path

from caraserve.gpu.driver.detect import capability
from caraserve.gpu.driver.libcuda import Attribute, Cuda

_PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about a device. CUDA 13.2 is 13020, compute capability 9.0 is 90. `numa_node`: the node whose memory is
    nearest, None if the system does not report it; `lockable_bytes`: the limit of `ulimit -l`, None for no limit."""

    name: str
    capability: int
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    free_bytes: int
    driver_version: int
    has_stream_memory_operations: bool
    uses_host_pointers: bool  # registered host memory has the same address on host and device
    pci_bus_id: str
    numa_node: int | None
    lockable_bytes: int | None


def device_facts(cuda: Cuda, device: int = 0, pci_devices: Path = _PCI_DEVICES) -> DeviceFacts:
    """Reads the facts. Makes the device's primary context current on this thread, which starts the device if needed."""
    handle = cuda.number("cuDeviceGet", device)
    cuda.call("cuCtxSetCurrent", cuda.number("cuDevicePrimaryCtxRetain", handle))
    free_bytes, memory_bytes = cuda.memory()
    pci_bus_id = cuda.text("cuDeviceGetPCIBusId", handle)
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return DeviceFacts(
        name=cuda.text("cuDeviceGetName", handle),
        capability=capability(cuda, handle),
        multiprocessors=cuda.attribute(Attribute.MULTIPROCESSOR_COUNT, handle),
        l2_bytes=cuda.attribute(Attribute.L2_CACHE_SIZE, handle),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        driver_version=cuda.number("cuDriverGetVersion"),
        has_stream_memory_operations=bool(cuda.attribute(Attribute.CAN_USE_64_BIT_STREAM_MEM_OPS, handle)),
        uses_host_pointers=bool(cuda.attribute(Attribute.CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, handle)),
        pci_bus_id=pci_bus_id,
        numa_node=_numa_node(pci_devices / pci_bus_id.lower() / "numa_node"),
        lockable_bytes=None if lockable == resource.RLIM_INFINITY else lockable,
    )


def _numa_node(file: Path) -> int | None:
    try:
        node = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
