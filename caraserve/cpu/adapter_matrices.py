"""Reads matrices of adapters from files into images: one pass that copies them and finds their largest values.

Python's own calls would take the interpreter's lock four times for each of some hundred matrices, and wait for the
event loop's thread each time.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL, Bytes
from caraserve.core.matrix_copy import MATRIX_COPY, UNREAD, CopyMatrices
from caraserve.cpu.jit import entry, kernel

_BLOCK_BYTES = 128 << 10  # read at a time: they are in the core's cache when they are looked at
_ABSOLUTE_16, _ABSOLUTE_32 = np.uint16(0x7FFF), np.uint32(0x7FFFFFFF)
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))


@entry
def _copy_matrices(copies, image, wide_image, image_address, scratch, wide_scratch, scratch_address, largest):  # type: ignore[no-untyped-def]
    for index in range(len(copies)):
        copy = copies[index]
        if copy.itemsize == 2:
            found = _copied(copy, image, image_address, scratch, scratch_address, _ABSOLUTE_16)
        else:
            found = _copied(copy, wide_image, image_address, wide_scratch, scratch_address, _ABSOLUTE_32)
        largest[index] = found


@kernel
def _copied(copy, image, image_address, scratch, scratch_address, absolute):  # type: ignore[no-untyped-def]
    """Copies one matrix. Returns its largest bits without a sign, or UNREAD."""
    file, offset, columns, stride, size = copy.file, copy.offset, copy.columns, copy.stride, copy.itemsize
    start, total = copy.target // size, copy.rows * columns
    is_whole = copy.is_b == 0 and columns == stride  # lies in the image as it does in the file
    count = len(scratch) // columns * columns
    largest, first = np.int64(0), np.int64(0)
    while first < total:
        values = count if count < total - first else total - first
        address = image_address + (start + first) * size if is_whole else scratch_address
        if not _read(file, address, values * size, offset + first * size):
            return np.int64(UNREAD)
        found = _largest(image, start + first, values, absolute) if is_whole else _largest(scratch, 0, values, absolute)
        if found > largest:
            largest = found
        if not is_whole:
            row, end = first // columns, (first + values) // columns
            place = np.int64(0)
            while row < end:
                if copy.is_b:
                    to, step = start + row // PANEL * stride * PANEL + row % PANEL, PANEL
                else:
                    to, step = start + row * stride, 1
                for column in range(columns):
                    image[to + column * step] = scratch[place + column]
                row, place = row + 1, place + columns
        first += values
    return largest


@kernel
def _read(file, address, left, offset):  # type: ignore[no-untyped-def]
    """Reads `left` bytes; False: it could not."""
    while left > 0:
        count = _pread(np.int32(file), address, left, offset)
        if count <= 0:
            return False
        address, left, offset = address + count, left - count, offset + count
    return True


@kernel
def _largest(values, start, count, absolute):  # type: ignore[no-untyped-def]
    largest = np.uint32(0)
    for index in range(start, start + count):
        bits = np.uint32(values[index] & absolute)
        if bits > largest:
            largest = bits
    return np.int64(largest)


def _copy(copies: NDArray[np.void], image: Bytes, largest: NDArray[np.int64]) -> None:
    most = int(copies["columns"].max(initial=1))  # a row at least
    scratch = np.empty(max(_BLOCK_BYTES, 4 * most), np.uint8)
    addresses = image.ctypes.data, scratch.ctypes.data
    images, scratches = ([one.view(np.uint16), one.view(np.uint32)] for one in (image, scratch))
    _copy_matrices(copies, *images, addresses[0], *scratches, addresses[1], largest)


def compiled_copies() -> CopyMatrices:
    """Returns the compiled function, which is compiled or loaded from the cache now."""
    _copy(np.empty(0, MATRIX_COPY), np.empty(0, np.uint8), np.empty(0, np.int64))
    return _copy
