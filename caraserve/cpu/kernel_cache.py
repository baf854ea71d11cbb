"""Where compiled kernels are kept. Imports no compiler.

Numba's cache looks at the file of a cached function alone, so the folder's name carries a digest of every source file
of this package: an edited callee can never be served stale.
"""

import hashlib
import sys
from pathlib import Path

from caraserve.util.cache_folder import cache_folder

_SOURCES = Path(__file__).parent


def kernel_folder() -> Path:
    """Returns the folder of the kernels of these sources."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_folder("kernels") / digest.hexdigest()[:16]


def has_kernels() -> bool:
    """Returns whether this version of Python has compiled kernels of these sources. For other options other kernels may
    be needed."""
    return any(kernel_folder().glob(f"{__package__}/*.py{sys.version_info.major}{sys.version_info.minor}*.nbc"))
