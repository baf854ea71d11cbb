"""Reads the base model's linears from its files, for what is computed with them when an adapter is read."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from caraserve.model.checkpoint import StoredNames, open_tensors
from caraserve.model.dtype import to_float32
from caraserve.model.linear_plan import LinearPlan

_PIECE_NUMBERS = 1 << 18  # of a piece: in double precision 2 MiB, which stay in a core's cache
_KEPT_BYTES = 128 << 20  # of norms: those of ten adapters of all modules of a model of 8 billion parameters


class BaseLinears:
    """The linears of a model. Opens the files at each call, so that several threads may read. Every error is a
    ModelLoadError that names the tensor."""

    def __init__(self, folder: Path, stored_names: StoredNames = lambda name: (name,)) -> None:
        """`stored_names`: returns the names that a tensor may have in the files."""
        self._folder, self._stored_names, self._lock = folder, stored_names, Lock()
        self._norms: OrderedDict[tuple[str, bytes], NDArray[np.float64]] = OrderedDict()
        self._norm_bytes = 0

    def weights(self, linear: LinearPlan) -> Iterator[NDArray[np.float32]]:
        """Yields the weights of a linear as numbers, [outputs, inputs], a few outputs at a time, in order."""
        rows = max(1, _PIECE_NUMBERS // linear.inputs)
        shape = (linear.inputs, linear.outputs) if linear.transposed else (linear.outputs, linear.inputs)
        with open_tensors(self._folder, self._stored_names) as reader:
            stored = linear.format.read(reader, linear.module, shape)
            whole = linear.format.values(stored).T if linear.transposed else None
            for first in range(0, linear.outputs, rows):
                some = range(first, min(first + rows, linear.outputs))
                yield linear.format.values(stored.rows(some)) if whole is None else whole[first : first + rows]

    def bias(self, linear: LinearPlan) -> NDArray[np.float32]:
        """Returns the bias of each output; 0 for a linear without."""
        if not linear.bias:
            return np.zeros(linear.outputs, np.float32)
        with open_tensors(self._folder, self._stored_names) as reader:
            return to_float32(*reader(f"{linear.module}.bias", (linear.outputs,)))

    def norms(self, linear: LinearPlan, b: NDArray[np.float64], a: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the norm of each row of the weights plus b a, [outputs]. Takes about 5 ns for each weight; the last
        results are kept, because an adapter is read when it is registered and again when it is needed."""
        key = linear.module, hashlib.sha256(b.tobytes() + a.tobytes()).digest()
        with self._lock:
            if key in self._norms:
                self._norms.move_to_end(key)
                return self._norms[key]
        norms, first = np.empty(linear.outputs), 0
        for weights in self.weights(linear):
            rows = slice(first, first + len(weights))
            changed = weights + b[rows] @ a
            norms[rows], first = np.sqrt(np.einsum("oi,oi->o", changed, changed)), rows.stop
        with self._lock:
            if key not in self._norms:
                self._norms[key], self._norm_bytes = norms, self._norm_bytes + norms.nbytes
            while self._norm_bytes > _KEPT_BYTES:
                self._norm_bytes -= self._norms.popitem(last=False)[1].nbytes
        return norms
