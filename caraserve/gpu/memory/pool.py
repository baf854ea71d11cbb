"""Device memory shared by KV blocks and adapters: allocation and moves.

    0                      kv_end          first adapter                           num_bytes
    | KV blocks, in order   |  free for both   | adapter | hole | adapter | adapter |

An adapter is one contiguous extent, so kernels read it without an index. Holes are closed by moving adapters, which
takes half a ms per GB and changes only table entries. KV blocks never move. The adapter manager decides evictions; the
pool decides what fits. Freed bytes are available at once, together with the marks (driver/streams.py) after which they
may be written: the next owner's stream waits for these, and the host never does.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from caraserve.gpu.driver.streams import NOTHING, Marks, covers, latest
from caraserve.util.units import align_up

GRANULE_BYTES = 2 << 20  # a page of device memory


@dataclass(frozen=True, slots=True)
class Move:
    """Moves an adapter's bytes to a higher address."""

    slot: int
    source: int
    target: int
    num_bytes: int

    def copies(self) -> Iterator[tuple[int, int, int]]:
        """Yields copies (target, source, bytes), to be issued in this order. No copy overlaps itself or overwrites what
        a later one reads: the last bytes are copied first, each copy as long as the move's distance."""
        step, end = self.target - self.source, self.num_bytes
        while end > 0:
            start = max(0, end - step)
            yield self.target + start, self.source + start, end - start
            end = start


@dataclass(frozen=True, slots=True)
class Grant:
    """Bytes that may be written after the marks `after`. The moves come first, in order, on the compute lane after
    `moves_after`."""

    start: int
    num_bytes: int
    after: Marks
    moves: tuple[Move, ...] = ()
    moves_after: Marks = NOTHING


@dataclass(slots=True, order=True)
class _Extent:
    start: int
    num_bytes: int = field(compare=False)
    slot: int = field(compare=False)
    pins: int = field(default=1, compare=False)
    moved: Marks = field(default=NOTHING, compare=False)

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    @property
    def is_fixed(self) -> bool:
        return self.pins > 0


@dataclass(frozen=True, slots=True)
class _Gap:
    """Neighbouring extents [first, last) whose holes become one when they move up."""

    first: int
    last: int
    moved_bytes: int


class DevicePool:
    """Allocates the bytes [0, num_bytes). Adapters are identified by their adapter slot."""

    def __init__(
        self,
        num_bytes: int,
        block_bytes: int,
        *,
        lora_bytes: int | None = None,
        least_kv_blocks: int = 0,
        granule: int = GRANULE_BYTES,
    ) -> None:
        """`lora_bytes`: the most for all adapters together. `least_kv_blocks`: blocks that adapters never take."""
        self.num_bytes = num_bytes // granule * granule
        self.block_bytes = block_bytes
        self.lora_bytes = self.num_bytes if lora_bytes is None else lora_bytes
        self.kv_blocks = 0
        self._least_kv_bytes = least_kv_blocks * block_bytes
        self._granule = granule
        self._extents: list[_Extent] = []  # in order of address
        self._by_slot: dict[int, _Extent] = {}
        self._stale: list[tuple[int, int, Marks]] = []  # freed [start, end), and marks until which it may be in use
        if self._least_kv_bytes > self.num_bytes:
            raise ValueError(f"{least_kv_blocks} KV blocks do not fit in {num_bytes} bytes")

    # --- queries ---

    @property
    def adapter_bytes(self) -> int:
        """Returns the bytes that adapters take, with their granules' padding."""
        return sum(extent.num_bytes for extent in self._extents)

    def takes(self, num_bytes: int) -> int:
        """Returns the bytes, in whole granules, that an adapter of `num_bytes` takes."""
        return align_up(max(num_bytes, 1), self._granule)

    def place_of(self, slot: int) -> int:
        """Returns the offset of an adapter."""
        return self._by_slot[slot].start

    def moved(self, slot: int) -> Marks:
        """Returns the marks after which an adapter's bytes are at their place, for lanes other than the compute
        lane."""
        return self._by_slot[slot].moved

    # --- adapters ---

    def place(self, slot: int, num_bytes: int, moved: Marks) -> Grant | None:
        """Allocates bytes for an adapter, pinned until `unpin`, or returns None if it does not fit now. `moved`: the
        mark after the moves, which the caller is about to issue. Raises ValueError if it never fits."""
        need = self.takes(num_bytes)
        if need > (most := min(self.lora_bytes, self.num_bytes - self._lowest(0))):
            raise ValueError(f"an adapter takes {need} bytes of the pool, and all adapters may take {most}")
        if slot in self._by_slot:
            raise AssertionError(f"adapter slot {slot} has bytes already")
        window = self._window(need) if self.adapter_bytes + need <= self.lora_bytes else None
        if window is None:
            return None
        end, moves, moves_after = self._move(window, moved)
        extent = _Extent(end - need, need, slot)
        insort(self._extents, extent)
        self._by_slot[slot] = extent
        return Grant(extent.start, need, self._marks(extent.start, extent.end), moves, moves_after)

    def pin(self, slot: int) -> None:
        """Pins an adapter to its place, because another lane than the compute lane uses its bytes."""
        self._by_slot[slot].pins += 1

    def unpin(self, slot: int) -> None:
        """Undoes one `pin` or `place`."""
        extent = self._by_slot[slot]
        if extent.pins == 0:
            raise AssertionError(f"adapter slot {slot} is not pinned")
        extent.pins -= 1

    def release(self, slot: int, until: Marks) -> None:
        """Frees an adapter's bytes, pinned or not. `until`: marks after which nothing uses them; the latest marks of
        all lanes would make the next load wait for a lane that waits for CPU workers."""
        extent = self._by_slot.pop(slot)
        self._extents.remove(extent)
        self._give_back(extent.start, extent.end, latest(until, extent.moved))  # a move of its bytes may be in progress

    # --- KV blocks ---

    def resize_kv(self, blocks: int, *, until: Marks, moved: Marks) -> Grant | None:
        """Makes the KV blocks [0, blocks), or returns None and changes nothing if adapters cannot be moved out of the
        way now. `until`: marks until which removed blocks may be in use. `moved`: as in `place`. Raises ValueError if
        the pool is too small."""
        if blocks * self.block_bytes > self.num_bytes:
            raise ValueError(f"{blocks} KV blocks do not fit in {self.num_bytes} bytes")
        window = self._kv_window(blocks)
        if window is None:
            return None
        before, end = self.kv_blocks * self.block_bytes, blocks * self.block_bytes
        _, moves, moves_after = self._move(window, moved) if end > before else (0, (), NOTHING)
        self.kv_blocks = blocks
        if end < before:
            self._give_back(end, before, until)
        return Grant(before, max(0, end - before), self._marks(before, end), moves, moves_after)

    # --- bookkeeping ---

    def drop_passed(self, passed: Marks) -> None:
        """Drops marks that have been passed; to be called often, so that the list stays short."""
        self._stale = [entry for entry in self._stale if not covers(passed, entry[2])]

    # --- holes ---

    def _lowest(self, kv_blocks: int) -> int:
        """Returns the first byte that adapters may use."""
        return align_up(max(kv_blocks * self.block_bytes, self._least_kv_bytes), self._granule)

    def _holes(self) -> list[int]:
        """Returns the free bytes before each extent in order, and after the last."""
        starts = [extent.start for extent in self._extents] + [self.num_bytes]
        ends = [self._lowest(self.kv_blocks)] + [extent.end for extent in self._extents]
        return [start - end for start, end in zip(starts, ends, strict=True)]

    def _window(self, need: int) -> _Gap | None:
        """Chooses the moves of the fewest bytes that make `need` contiguous bytes free. Without a move: the smallest
        hole among adapters, and last the space next to the KV blocks, which KV may need."""
        holes = self._holes()
        fitting = [(hole, index) for index, hole in enumerate(holes) if hole >= need and index > 0]
        if fitting or holes[0] >= need:
            at = min(fitting)[1] if fitting else 0
            return _Gap(at, at, 0)
        best: _Gap | None = None
        first = total = moved = 0
        for last, hole in enumerate(holes):
            if last > 0 and self._extents[last - 1].is_fixed:
                first, total, moved = last, 0, 0
            elif last > 0:
                moved += self._extents[last - 1].num_bytes
            total += hole
            while first < last and total - holes[first] >= need:
                total -= holes[first]
                moved -= self._extents[first].num_bytes
                first += 1
            if total >= need and (best is None or moved < best.moved_bytes):
                best = _Gap(first, last, moved)
        return best

    def _kv_window(self, blocks: int) -> _Gap | None:
        """Chooses the moves that make memory for `blocks` KV blocks."""
        need = self._lowest(blocks) - self._lowest(self.kv_blocks)
        total = moved = 0
        for last, hole in enumerate(self._holes()):
            if last > 0 and self._extents[last - 1].is_fixed:
                return None
            moved += self._extents[last - 1].num_bytes if last > 0 else 0
            total += hole
            if total >= need:
                return _Gap(0, last, moved)
        return None

    def _move(self, window: _Gap, moved: Marks) -> tuple[int, tuple[Move, ...], Marks]:
        """Moves a window's extents up to the extent above the window; there is a hole below that one. Returns the end
        of the resulting hole, the moves, and the marks after which the moves may write."""
        above = self._extents[window.last].start if window.last < len(self._extents) else self.num_bytes
        moves: list[Move] = []
        after = NOTHING
        for extent in reversed(self._extents[window.first : window.last]):
            target = above - extent.num_bytes
            moves.append(Move(extent.slot, extent.start, target, extent.num_bytes))
            after = latest(after, self._marks(target, above))
            extent.start, extent.moved = target, moved
            above = target
        for move in moves:
            self._give_back(move.source, move.source + move.num_bytes, moved)
        return above, tuple(moves), after

    def _give_back(self, start: int, end: int, until: Marks) -> None:
        """Records freed bytes. Keeps older marks on them until passed: the owner in between may not have waited for
        them."""
        covered = [e for e in self._stale if start <= e[0] and e[1] <= end and covers(until, e[2])]
        self._stale = [entry for entry in self._stale if entry not in covered]
        if until != NOTHING:
            self._stale.append((start, end, until))

    def _marks(self, start: int, end: int) -> Marks:
        """Returns the marks after which the bytes may be written."""
        return latest(*(marks for low, high, marks in self._stale if low < end and start < high))
