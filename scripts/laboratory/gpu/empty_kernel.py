"""A kernel that does nothing, for measuring what a launch costs."""

import triton


@triton.jit
def empty_kernel():  # type: ignore[no-untyped-def]
    """Does nothing."""


def launch_empty(count: int) -> None:
    """Launches the kernel `count` times, one block each."""
    for _ in range(count):
        empty_kernel[(1,)](num_warps=1)
