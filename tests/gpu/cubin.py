"""Reads kernels' resources and instructions from a cubin: an ELF file with NVIDIA's sections."""

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes in .nv.info
_WITH_SIZE = 4  # format of attributes that have a body


@dataclass(frozen=True, slots=True)
class Kernel:
    """Resources of a kernel. `frame_bytes`: local memory per thread, where spilled registers would be."""

    registers: int
    frame_bytes: int
    shared_bytes: int


def _name(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _sections(cubin: bytes) -> dict[str, tuple[bytes, int]]:
    """Returns contents and size of each section by name; contents are empty if the section has none in the file."""
    start, count, names_at = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HH", cubin, 60))
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + 64 * index) for index in range(count)]
    names = cubin[headers[names_at][4] :]
    return {_name(names, name): (cubin[at : at + size], size) for name, _, _, _, at, size in headers}


def kernels(cubin: bytes) -> dict[str, Kernel]:
    """Returns the resources of each kernel by name."""
    sections = _sections(cubin)
    info, symbols, names = (sections[name][0] for name in (".nv.info", ".symtab", ".strtab"))
    values: dict[tuple[int, str], int] = {}
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _WITH_SIZE:
            symbol, value = struct.unpack_from("<II", info, at) if size == 8 else (0, 0)
            values[attribute, _name(names, struct.unpack_from("<I", symbols, 24 * symbol)[0])] = value
            at += size
    found = {name for attribute, name in values if attribute == _REGISTERS}
    return {
        name: Kernel(
            values[_REGISTERS, name],
            values.get((_FRAME, name), 0),
            sections.get(f".nv.shared.{name}", (b"", 0))[1],
        )
        for name in found
    }


def instructions(cubin: bytes) -> dict[str, list[str]]:
    """Returns each kernel's instructions in order, without operands, such as `LDG.E.128`."""
    files = metadata.files("nvidia-cuda-nvdisasm") or []
    tool = next(str(file.locate()) for file in files if file.name == "nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    listings = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)[1:]
    line = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", re.MULTILINE)
    return {name: line.findall(body) for name, body in zip(listings[::2], listings[1::2], strict=True)}
