"""Loads the base model's weights from a checkpoint to the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.linear.base import SCALE, TORCH_CODES, Fill, ReadMatrix
from caraserve.gpu.memory.weight_transfer import TransferFigures, WeightTransfer
from caraserve.gpu.weights import Weights
from caraserve.model.checkpoint import StoredNames, open_tensors
from caraserve.model.folder_reader import FolderReader, StoredTensor
from caraserve.model.formats import Matrix, WeightFormat
from caraserve.model.gguf.reader import GgufReader

_CODES = {theirs: ours for ours, theirs in TORCH_CODES.items()}


class Load(Protocol):
    """Allocates weights on a device, and fills every tensor in the same order at each call; see `weights.load`."""

    def __call__(
        self, device: torch.device, fill: Fill, progress: Callable[[], None], read: ReadMatrix, /
    ) -> Weights: ...


def load_checkpoint(
    folder: Path,
    device: GpuDevice,
    load: Load,
    progress: Callable[[], None] = lambda: None,
    stored_names: StoredNames = lambda name: (name,),
) -> tuple[Weights, TransferFigures]:
    """Fills weights with a checkpoint's tensors, and says how fast. `stored_names`: returns the names that a tensor may
    have in the folder.

    Calls `load` on torch's device without memory first, because threads read tensors before they are asked for: that
    shows their order, and finds what is missing before any is read but the scales of quantised modules, which are small
    and kept. Weights in grouped codes are not among these tensors: the thread that fills reads them itself. Raises
    ModelLoadError for files that cannot be read or change meanwhile, ConfigError if no host memory can be pinned,
    DriverError, and the errors of `load`.
    """
    with open_tensors(folder, stored_names) as reader:
        found: list[StoredTensor] = []
        scales: dict[str, NDArray[np.float32]] = {}

        def find(name: str, target: Tensor) -> None:
            if name.endswith(SCALE):
                scales[name] = _scales(reader, name, len(target))
            else:
                found.append(reader.find(name, tuple(target.shape), _CODES.get(target.dtype)))

        def read(stored: WeightFormat, module: str, shape: tuple[int, ...]) -> Matrix:
            if len(shape) == 3:
                return stored.read_stacked(reader, module, (shape[0], shape[1], shape[2]))
            return stored.read(reader, module, (shape[0], shape[1]))

        load(torch.device("meta"), find, lambda: None, read)
        with WeightTransfer(device, found) as transfer:

            def fill(name: str, target: Tensor) -> None:
                if name in scales:
                    target.copy_(torch.from_numpy(scales[name]))
                else:
                    transfer.fill(name, target)

            weights = load(device.device, fill, progress, read)
            return weights, transfer.figures()


def _scales(reader: FolderReader | GgufReader, name: str, count: int) -> NDArray[np.float32]:
    """Returns the scales of a quantised module's outputs, or of its inputs."""
    module, _, what = name.rpartition(".")
    if what == "input_scale":
        return np.full(count, reader.input_scale(module), np.float32)
    return reader.scales(module, count).copy()
