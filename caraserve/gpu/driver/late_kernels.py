"""Reports Triton kernels that are compiled or loaded while serving: each delays all requests, and all are expected to
be loaded before."""

import logging
from typing import Any

from triton import knobs

log = logging.getLogger(__name__)


class LateKernels:
    """Counts and logs them. Triton has one hook in a process, which belongs to the last object that watches."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        """Reports kernels from now on."""
        knobs.runtime.jit_post_compile_hook = self._report

    def stop(self) -> None:
        """Reports no more kernels."""
        if knobs.runtime.jit_post_compile_hook == self._report:
            knobs.runtime.jit_post_compile_hook = None

    def _report(self, *, repr: str, **_: Any) -> None:  # noqa: A002  the name that Triton gives it
        """Called by Triton on the thread that launches, with the kernel's name, options and types of arguments."""
        self.count += 1
        log.error("a kernel was compiled or loaded while requests waited; the warm-up lacks this form of it: %s", repr)
