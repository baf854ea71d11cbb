"""Divides an adapter's layers into the groups in which they are copied, one after another. No I/O.

A prefill waits for no layer if every group arrives before its first layer is reached. More groups let the prefill start
earlier; each costs the thread that launches iterations some time.
"""

from collections.abc import Sequence

MOST_GROUPS = 8  # of one adapter
_GROUP_MS = 0.06  # that a group costs: its copy, its words and its mark are issued before an iteration is launched
_STEPS = 12  # of a bisection: a start is found to the 4,000th part of the whole copy


def group_ends(layers: int, ahead_ms: float, load_ms: float, layer_ms: float, most: int = MOST_GROUPS) -> Sequence[int]:
    """Returns where the groups of `layers` layers end, at most `most`, with which a prefill may start first.

    `ahead_ms`: from the begin of the copy to the earliest time at which the first of these layers is reached. A layer
    is copied in `load_ms` and computed in `layer_ms`. All are one group if they arrive before that.
    """
    best: Sequence[int] = [layers]
    least_ms = max(0.0, layers * load_ms - ahead_ms) + _GROUP_MS
    for count in range(2, most + 1):
        if count * _GROUP_MS >= least_ms:
            break
        delay_ms, ends = _earliest(layers, ahead_ms, load_ms, layer_ms, count)
        if delay_ms + count * _GROUP_MS < least_ms:
            best, least_ms = ends, delay_ms + count * _GROUP_MS
    return best


def groups_in_time(layers: int, ahead_ms: float, load_ms: float, layer_ms: float, most: int) -> Sequence[int] | None:
    """Returns where the fewest groups end of which each arrives before its first layer is reached, or None if so many
    are not enough. Arguments as for `group_ends`."""
    ends = [0]
    while ends[-1] < layers:
        reached_ms = ahead_ms + ends[-1] * layer_ms
        end = layers if layers * load_ms <= reached_ms else int(reached_ms / load_ms)
        if end <= ends[-1] or len(ends) > most:
            return None
        ends.append(end)
    return ends[1:]


def _earliest(layers: int, ahead_ms: float, load_ms: float, layer_ms: float, most: int) -> tuple[float, Sequence[int]]:
    """Returns the least delay of the prefill with which at most `most` groups are in time, and their ends."""
    low_ms, high_ms = 0.0, max(0.0, layers * load_ms - ahead_ms)
    found: Sequence[int] = [layers]
    for step in range(_STEPS):
        delay_ms = 0.0 if step == 0 else (low_ms + high_ms) / 2
        ends = groups_in_time(layers, ahead_ms + delay_ms, load_ms, layer_ms, most)
        if ends is None:
            low_ms = delay_ms
        else:
            high_ms, found = delay_ms, ends
            if step == 0:
                break
    return high_ms, found
