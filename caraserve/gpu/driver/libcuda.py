"""The CUDA driver library through ctypes: the calls that CaraServe makes, with their exact prototypes.

The driver is part of the machine and not of a wheel, so it is opened when first needed. Names end in `_v2` where the
header maps them so: the plain symbols are older calls with narrower arguments or other conditions. Unlike with the
runtime library, a failed call leaves no error behind that torch's next call would report.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_ulonglong, c_void_p
from enum import IntEnum
from typing import Any, ClassVar

from caraserve.gpu.driver.api import DriverError

LIBRARY = "libcuda.so.1"
NOT_READY = 600  # result of a query while work is pending

MEMHOSTREGISTER_PORTABLE = 1
MEMHOSTREGISTER_DEVICEMAP = 2
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
STREAM_WAIT_VALUE_GEQ = 0  # comparison that wraps around
STREAM_WRITE_VALUE_DEFAULT = 0  # ordered after all earlier operations
STREAM_MEM_OP_WAIT_VALUE_32 = 1
STREAM_MEM_OP_WRITE_VALUE_32 = 2
STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
GRAPH_INSTANTIATE_USE_NODE_PRIORITY = 8
MEMORYTYPE_UNIFIED = 4
LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class Attribute(IntEnum):
    """Device attributes."""

    MULTIPROCESSOR_COUNT = 16
    L2_CACHE_SIZE = 38
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
    CAN_USE_64_BIT_STREAM_MEM_OPS = 122  # version 2 of the operations, which includes 32-bit ones


_SIDE = (  # of a copy
    *(("XInBytes", c_size_t), ("Y", c_size_t), ("MemoryType", c_int), ("Host", c_void_p), ("Device", c_uint64)),
    *(("Array", c_void_p), ("Pitch", c_size_t)),
)


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D with 64-bit sizes."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *((f"src{name}", kind) for name, kind in _SIDE),
        *((f"dst{name}", kind) for name, kind in _SIDE),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    ]


class WordOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, a union, as the members `waitValue` and `writeValue` of 32 bits."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("operation", c_int),
        ("address", c_uint64),
        ("value", c_uint64),  # of 32 bits
        ("flags", c_uint),
        ("alias", c_uint64),
        ("pad", c_uint64),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with the member `programmaticStreamSerializationAllowed` of its union."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("id", c_int),
        ("pad", c_int),
        ("allowed", c_int),
        ("rest", c_ubyte * 60),  # of the union
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *((f"{what}Dim{axis}", c_uint) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", POINTER(LaunchAttribute)),
        ("numAttrs", c_uint),
    ]


_Handle = c_void_p  # contexts, streams, events, graphs, functions
_Address = c_uint64  # CUdeviceptr
_Device = c_int
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_Device), c_int),
    "cuDeviceGetName": (c_char_p, c_int, _Device),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _Device),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), _Device),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, _Device),
    "cuDevicePrimaryCtxRetain": (POINTER(_Handle), _Device),
    "cuCtxSetCurrent": (_Handle,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(_Address), c_void_p, c_uint),
    "cuMemcpyAsync": (_Address, _Address, c_size_t, _Handle),
    "cuMemcpy2DAsync_v2": (POINTER(Memcpy2D), _Handle),
    "cuMemsetD8Async": (_Address, c_ubyte, c_size_t, _Handle),
    "cuMemsetD32Async": (_Address, c_uint, c_size_t, _Handle),
    "cuStreamCreateWithPriority": (POINTER(_Handle), c_uint, c_int),
    "cuStreamDestroy_v2": (_Handle,),
    "cuStreamWaitEvent": (_Handle, _Handle, c_uint),
    "cuStreamWaitValue32_v2": (_Handle, _Address, c_uint32, c_uint),
    "cuStreamWriteValue32_v2": (_Handle, _Address, c_uint32, c_uint),
    "cuStreamBatchMemOp_v2": (_Handle, c_uint, POINTER(WordOperation), c_uint),
    "cuStreamBeginCapture_v2": (_Handle, c_int),
    "cuStreamEndCapture": (_Handle, POINTER(_Handle)),
    "cuLaunchKernelEx": (POINTER(LaunchConfig), _Handle, POINTER(c_void_p), POINTER(c_void_p)),
    "cuEventCreate": (POINTER(_Handle), c_uint),
    "cuEventRecord": (_Handle, _Handle),
    "cuEventQuery": (_Handle,),
    "cuEventSynchronize": (_Handle,),
    "cuGraphInstantiateWithFlags": (POINTER(_Handle), _Handle, c_ulonglong),
    "cuGraphUpload": (_Handle, _Handle),
    "cuGraphLaunch": (_Handle, _Handle),
    "cuGraphExecDestroy": (_Handle,),
    "cuGraphDestroy": (_Handle,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class Cuda:
    """The library, initialised. Calls must come from threads on which a context is current.

    Almost any call may wait for the device, so calls release the GIL. Queries keep it, because they never wait, and so
    does `call_at_once`: taking the GIL again from a busy event loop may cost a thread 5 ms, the call itself 2 µs."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises OSError if the library does not exist, DriverError if it has no device."""
        self._calls, self._keeping_gil = _functions(ctypes.CDLL(library)), _functions(ctypes.PyDLL(library))
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function. Raises DriverError with CUDA's name for the error."""
        if status := self._calls[name](*arguments):
            raise DriverError(f"{name}: {self._words(status)}")

    def call_at_once(self, name: str, *arguments: Any) -> None:
        """Calls a function that does not wait for the device, and keeps the GIL."""
        if status := self._keeping_gil[name](*arguments):
            raise DriverError(f"{name}: {self._words(status)}")

    def ask(self, name: str, *arguments: Any) -> bool:
        """Returns whether a query finds all work done; keeps the GIL. Raises DriverError if the work has failed."""
        status = self._keeping_gil[name](*arguments)
        if status not in (0, NOT_READY):
            raise DriverError(f"{name}: {self._words(status)}")
        return bool(status == 0)

    def number(self, name: str, *arguments: Any) -> int:
        """Returns what a call writes to its first argument: a handle, an address, a count."""
        out = _PROTOTYPES[name][0]._type_()  # type: ignore[attr-defined]  # the type that the pointer points to
        self.call(name, ctypes.byref(out), *arguments)
        return int(out.value or 0)

    def text(self, name: str, *arguments: Any) -> str:
        """Returns what a call writes to its first argument, a buffer whose size is the second."""
        buffer = ctypes.create_string_buffer(256)
        self.call(name, buffer, len(buffer), *arguments)
        return buffer.value.decode(errors="replace")

    def memory(self) -> tuple[int, int]:
        """Returns (free, total) bytes of the device whose context is current."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def attribute(self, attribute: Attribute, device: int) -> int:
        """Returns a property of a device."""
        return self.number("cuDeviceGetAttribute", attribute, device)

    def _words(self, status: int) -> str:
        name, text = c_char_p(), c_char_p()
        for call, out in (("cuGetErrorName", name), ("cuGetErrorString", text)):
            if self._calls[call](status, ctypes.byref(out)) != 0:
                return f"error {status}, which the driver has no name for"
        return f"{(name.value or b'').decode()} ({(text.value or b'').decode()})"


def _functions(library: ctypes.CDLL) -> dict[str, Any]:
    """Returns the functions of the library, by name. Raises DriverError if one is missing."""
    found: dict[str, Any] = {}
    for name, types in _PROTOTYPES.items():
        function = getattr(library, name, None)
        if function is None:
            raise DriverError(f"{library._name} lacks {name}: it is too old")
        function.argtypes, function.restype = types, c_int
        found[name] = function
    return found
