"""Encodes plans as bytes, for other instances and for the process that makes plans.

The bytes do not contain the digest: `decoded` computes it from the content, and the receiver compares it with the one
that was published.
"""

import math
import zlib
from typing import Any

import orjson

from caraserve.cluster.placement.plan import PlacementPlan, Share

MAX_PLAN_BYTES = 64 << 20  # 40,000 adapters with two copies each take 3 MB, and half a megabyte packed
_FORMAT = 1


def packed(value: Any) -> bytes:
    """Returns a value as compressed JSON."""
    return zlib.compress(orjson.dumps(value), 1)


def unpacked(body: bytes) -> Any:
    """Returns the value of compressed JSON. Raises ValueError for other bytes, and for more than 64 MiB of JSON."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(body, MAX_PLAN_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError("it is cut short, or too large")
        return orjson.loads(text)
    except zlib.error as error:
        raise ValueError(str(error)) from None


def encoded(plan: PlacementPlan) -> bytes:
    """Encodes a plan."""
    names = sorted(plan.classes)
    at = {name: index for index, name in enumerate(names)}
    shares = {
        adapter: [value for share in shares for value in (at[share.instance], share.fraction)]
        for adapter, shares in plan.shares.items()
    }
    ranks = [plan.classes[name] for name in names]
    return packed([_FORMAT, plan.epoch, plan.peak, plan.strange, list(plan.overfull), names, ranks, shares])


def decoded(body: bytes) -> PlacementPlan:
    """Decodes a plan. Raises ValueError for other bytes: another version of this program may have written them."""
    try:
        written, epoch, peak, strange, overfull, names, ranks, listed = unpacked(body)
        if written != _FORMAT or type(epoch) is not int or epoch < 0 or len(set(names)) != len(names):
            raise ValueError("it is of another version")
        if not all(type(rank) is int for rank in ranks) or not all(isinstance(one, str) for one in (*names, *overfull)):
            raise ValueError("it is no plan")
        shares = {adapter: _shares(parts, names) for adapter, parts in listed.items()}
        classes = dict(zip(names, ranks, strict=True))
        return PlacementPlan.made(epoch, shares, classes, _real(peak), _real(strange), tuple(overfull))
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"it is no plan: {error}") from None


def _shares(parts: list[Any], names: list[str]) -> tuple[Share, ...]:
    shares = tuple(Share(names[_index(at)], _real(part)) for at, part in zip(parts[::2], parts[1::2], strict=True))
    if not shares or any(not 0 <= share.fraction <= 1 for share in shares):
        raise ValueError("its fractions are none")
    return shares


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("it names nobody")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("it has no number where one belongs")
    return float(value)
