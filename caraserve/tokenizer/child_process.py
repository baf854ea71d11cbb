"""What a process does that `MessageProcess` has started: it reads messages and answers each. Its memory has a bound.

A message is its length, as 8 bytes with the largest first, and its bytes. JSON lines would be simpler, but encoding and
decoding a long text as JSON holds the interpreter lock for 10 ms and more, on whichever thread.
"""

import os
import resource
import sys
from collections.abc import Iterator

LENGTH_BYTES = 8
MAX_ANSWER_BYTES = 4 << 20  # text that the server decodes within 5 ms


def messages() -> Iterator[bytes]:
    """Yields messages until the input ends."""
    source = sys.stdin.buffer
    while head := source.read(LENGTH_BYTES):
        yield source.read(int.from_bytes(head))


def answer(message: bytes) -> None:
    """Sends the answer to a message."""
    sys.stdout.buffer.write(len(message).to_bytes(LENGTH_BYTES) + message)
    sys.stdout.buffer.flush()


def data_bytes() -> int:
    """Returns the size of this process's private memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def limit_data(more_bytes: int) -> None:
    """Lets the private memory grow by at most `more_bytes`."""
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more_bytes,) * 2)
