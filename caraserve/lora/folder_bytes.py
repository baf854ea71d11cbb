"""Reads the small files of an adapter's folder, which anyone may have written: their sizes are bounded."""

import os
from pathlib import Path

from caraserve.errors import AdapterRejected
from caraserve.model.opened_file import TensorFileError, open_regular


def read_bytes(path: Path, most: int, *, is_start: bool = False) -> bytes:
    """Returns a file's bytes, or with `is_start` its first `most` ones. Raises AdapterRejected, also for a file that is
    larger than `most` bytes."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(most if is_start else most + 1)
    except TensorFileError as error:
        raise AdapterRejected(str(error)) from None
    except OSError as error:
        raise AdapterRejected(f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise AdapterRejected(f"{path.name} is larger than {most} bytes")
    return data
