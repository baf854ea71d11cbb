"""Compares the table of CUDA's calls with the header cuda.h."""

import ctypes
import re
from functools import cache

import pytest

from caraserve.gpu.driver import libcuda
from caraserve.gpu.driver.libcuda import Attribute, LaunchAttribute, LaunchConfig, Memcpy2D, WordOperation
from tests.gpu.stub_driver import HEADER, Stub

WIDTHS = {"unsigned char": 1, "int": 4, "unsigned int": 4, "cuuint32_t": 4, "unsigned long long": 8, "size_t": 8}
WIDTHS |= {"CUdeviceptr": 8, "CUdevice": 4, "CUresult": 4, "CUdevice_attribute": 4, "CUstreamCaptureMode": 4}
HANDLES = {"CUcontext", "CUstream", "CUevent", "CUgraph", "CUgraphExec", "CUfunction", "void *"}
BLOCKS = {"const CUDA_MEMCPY2D": ctypes.sizeof(Memcpy2D), "char": 1, "const char *": 8}
BLOCKS |= {
    "CUstreamBatchMemOpParams": ctypes.sizeof(WordOperation),
    "const CUlaunchConfig": ctypes.sizeof(LaunchConfig),
}


@cache
def declared() -> dict[str, list[str]]:
    """Returns the parameter types of each function, by its symbol name."""
    text = HEADER.read_text(encoding="utf-8")
    linked = dict(re.findall(r"#\s*define (cu\w+)\s+(?:__CUDA_API_PT\wZ\()?(cu\w+)", text))
    found = {}
    for name, parameters in re.findall(r"^CUresult CUDAAPI (cu\w+)\(([^;]*)\);", text, re.MULTILINE):
        found[linked.get(name, name)] = [re.sub(r"\w+$", "", text.strip()).strip() for text in parameters.split(",")]
    return found


def width(text: str) -> int:
    return WIDTHS[text] if text in WIDTHS else BLOCKS[text] if text in BLOCKS else 8 * (text in HANDLES)


@pytest.mark.parametrize("name", libcuda._PROTOTYPES)
def test_arguments_have_the_widths_in_the_header(name: str) -> None:
    types = libcuda._PROTOTYPES[name]
    assert len(types) == len(declared()[name])
    for kind, text in zip(types, declared()[name], strict=True):
        points = text.endswith("*") and text != "void *"
        assert points == (kind is ctypes.c_char_p or hasattr(kind, "contents"))
        if kind is ctypes.c_char_p:
            assert text == "char *"
        elif points:
            assert ctypes.sizeof(kind._type_) == width(text.removesuffix("*").strip())  # type: ignore[attr-defined]
        else:
            assert ctypes.sizeof(kind) == width(text)


@pytest.mark.parametrize("attribute", Attribute)
def test_attributes_have_the_numbers_in_the_header(attribute: Attribute) -> None:
    text = HEADER.read_text(encoding="utf-8")
    assert re.search(rf"CU_DEVICE_ATTRIBUTE_{attribute.name} = {attribute.value}\b", text)


@pytest.mark.parametrize(
    "name",
    [
        "MEMHOSTREGISTER_PORTABLE",
        "MEMHOSTREGISTER_DEVICEMAP",
        "STREAM_NON_BLOCKING",
        "EVENT_BLOCKING_SYNC",
        "EVENT_DISABLE_TIMING",
        "STREAM_WAIT_VALUE_GEQ",
        "STREAM_WRITE_VALUE_DEFAULT",
        "STREAM_MEM_OP_WAIT_VALUE_32",
        "STREAM_MEM_OP_WRITE_VALUE_32",
        "STREAM_CAPTURE_MODE_THREAD_LOCAL",
        "MEMORYTYPE_UNIFIED",
        "LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    ],
)
def test_flags_have_the_values_in_the_header(name: str) -> None:
    found = re.search(rf"\bCU_{name}\s*(?:=\s*)?(0x\w+|\d+)", HEADER.read_text(encoding="utf-8"))
    assert found
    assert int(found[1], 0) == getattr(libcuda, name)


def test_a_launchs_configuration_and_attributes_have_the_sizes_in_the_header(stub: Stub) -> None:
    """test_modules.py shows that the fields are where the driver looks for them."""
    assert (ctypes.sizeof(LaunchConfig), ctypes.sizeof(LaunchAttribute)) == stub.launch_bytes
