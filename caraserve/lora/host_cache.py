"""The host cache: adapter images in one arena of host memory, evicted least recently used first."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import HostAdapter
from caraserve.cpu.shared_memory import Arena


class HostCache:
    """Extents of the arena by digest: those of images, and of adapters that are being read. Not thread-safe."""

    def __init__(self, arena: Arena, moved: Callable[[str], None]) -> None:
        """`moved`: called with each digest whose image has come or gone."""
        self._arena, self._moved = arena, moved
        self._images: OrderedDict[str, HostAdapter] = OrderedDict()
        self._extents: dict[str, NDArray[np.uint8]] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._images

    def __len__(self) -> int:
        return len(self._images)

    def __reversed__(self) -> Iterator[str]:
        """Yields the digests of the images, the most recently used first."""
        return reversed(self._images)

    @property
    def num_bytes(self) -> int:
        """The size of the cache."""
        return self._arena.num_bytes

    def get(self, digest: str) -> HostAdapter | None:
        """Returns the image of a digest, or None."""
        return self._images.get(digest)

    def touch(self, digest: str) -> None:
        """Marks an image as used just now."""
        self._images.move_to_end(digest)

    def take(
        self, digest: str, num_bytes: int, is_needed: Callable[[str], bool], evict: Callable[[str], None]
    ) -> NDArray[np.uint8] | None:
        """Returns an extent to read an adapter into, and evicts images for it one by one, except those that
        `is_needed`. None: there is no room now, even so."""
        while (extent := self._arena.allocate(num_bytes)) is None:
            victim = next((other for other in self._images if not is_needed(other)), None)
            if victim is None:
                return None
            evict(victim)
        self._extents[digest] = extent
        return extent

    def keep(self, digest: str, image: HostAdapter) -> None:
        """Adds the image that was read into the extent of `digest`."""
        self._images[digest] = image
        self._moved(digest)

    def drop(self, digest: str) -> None:
        """Frees the extent of `digest`, and forgets its image if it was read to the end."""
        self._images.pop(digest, None)
        self._arena.free(self._extents.pop(digest))
        self._moved(digest)

    def rename(self, old: str, new: str) -> None:
        """Gives the extent of digest `old` another digest."""
        if old in self._extents:
            self._extents[new] = self._extents.pop(old)
        if old in self._images:
            self._images[new] = self._images.pop(old)

    def check(self, reading: set[str]) -> None:
        """Raises AssertionError unless each extent has an image or is `reading`, and the arena's bytes add up."""
        assert self._extents.keys() == self._images.keys() | reading, "an extent of the arena has no owner"
        assert self._arena.used_bytes >= sum(extent.nbytes for extent in self._extents.values()), "an extent is lost"
        self._arena.check()
