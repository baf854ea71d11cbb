"""The score head of an adapter: a matrix that makes scores of classes out of the hidden state of a text's last token.
It is small, is kept with the adapter's description, and is computed on the host. No I/O."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import Dtype, to_float32

# Classes, and bytes of the matrix: in a manifest it is text, for which there are 4 MiB. 256 classes of a model of
# 4,096 numbers in bf16 take 2 MiB.
MAX_CLASSES, MAX_HEAD_BYTES = 1024, 5 << 19
MAX_CLASS_CHARACTERS = 256  # of a name
MAX_HEAD_WEIGHT = 1e15  # with larger ones scores overflow, and NaN has no class
Activation = Literal["softmax", "sigmoid", "none"]
ACTIVATIONS: tuple[Activation, ...] = ("softmax", "sigmoid", "none")


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """One head. `classes`: their names. `data`: the matrix [classes, hidden]; empty until it has been read."""

    classes: tuple[str, ...]
    activation: Activation
    dtype: Dtype
    data: bytes = b""

    def logits(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the score of each class for a hidden state after the final norm."""
        scores: NDArray[np.float32] = _matrix(self) @ state
        return scores

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the activation of logits."""
        if self.activation == "none":
            return logits
        values = logits.astype(np.float64)
        if self.activation == "sigmoid":
            with np.errstate(over="ignore"):  # to infinity, whose reciprocal is 0
                values = 1.0 / (1.0 + np.exp(-values))
        else:
            powers = np.exp(values - values.max())
            values = powers / powers.sum()
        probabilities: NDArray[np.float32] = values.astype(np.float32)
        return probabilities


@lru_cache(8)  # one for all texts of a request: 2 MiB in bf16 take 1 ms to convert
def _matrix(head: ScoreHead) -> NDArray[np.float32]:
    values = to_float32(np.frombuffer(head.data, head.dtype.storage), head.dtype)
    return values.reshape(len(head.classes), -1)
