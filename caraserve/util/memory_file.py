"""Files in memory, which processes share and libraries read."""

import errno
import os

from caraserve.util.units import human_bytes


def memory_file(name: str, num_bytes: int) -> int:
    """Makes a file of zeros in memory, and returns its descriptor. Raises OSError, whose text names the limit that
    forbids a file of that size."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EFBIG:
            text = f"this process may not make files of {human_bytes(num_bytes)}, in memory neither; raise ulimit -f"
            raise OSError(errno.EFBIG, text) from None
        raise
    return descriptor
