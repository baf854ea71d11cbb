"""The kernels of attention that depend on the dtype of KV blocks, made for each."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from caraserve.cpu import attention, kv_append
from caraserve.cpu.jit import compiled_separately, kernel, made_for
from caraserve.cpu.tiles import key_store, keys_store, scores_tile, value_store, values_tile
from caraserve.model.dtype import Dtype

_COMPILED: list[Any] = []  # keeps functions alive of which others have the address


@dataclass(frozen=True, slots=True)
class KvKernels:
    """Addresses of compiled functions."""

    append: int  # kv_append.py
    attend_tile: int  # attention.py


@cache
def kv_kernels(dtype: Dtype) -> KvKernels:
    """Returns the kernels of a dtype, fp32 or bfloat16; compiles them, or loads them from the cache, at their first
    use."""
    name, code = dtype.name.lower(), dtype.value
    values: dict[str, Any] = {
        "_ITEMSIZE": np.int64(dtype.itemsize),
        "_store_value": value_store(code),
        "_store_key": key_store(code),
        "_store_keys": keys_store(code),
    }
    for rows in range(1, attention.TILE + 1):
        values[f"_scores{rows}"] = scores_tile(rows, code)
        values |= {f"_values{rows}x{vectors}": values_tile(rows, vectors, code) for vectors in (1, 4)}
    # In the order in which they call each other.
    for source in (
        *(kv_append.append_values, kv_append.append_keys, kv_append.append_run),
        *(attention.scores, attention.add_values),
    ):
        values[f"_{source.__name__}"] = kernel(made_for(name, **values)(source))
    append = compiled_separately(7)(made_for(name, **values)(kv_append.append))
    attend_tile = compiled_separately(9)(made_for(name, **values)(attention.attend_tile))
    _COMPILED.extend((append, attend_tile))
    return KvKernels(append.address, attend_tile.address)
