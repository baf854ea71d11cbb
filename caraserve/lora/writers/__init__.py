"""Opens the folder of an adapter, whichever program wrote it, as PEFT would have written it.

Each file translates one program's configuration, and the names and shapes of its tensors, into PEFT's; everything after
that is the same for all. To add a program, add its files to `folder_contents.py` and a line to `_opened`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caraserve.errors import AdapterRejected
from caraserve.lora.folder_contents import (
    GGUF_SUFFIX,
    MISTRAL_NAMES,
    TORCH_NAME,
    files_of,
    why_no_adapter,
)
from caraserve.lora.peft_config import load_fields
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.lora.writers import gguf, mistral, mlx, tinker
from caraserve.lora.writers.stored_adapter import StoredAdapter
from caraserve.model.gguf_reader import GgufFile
from caraserve.model.plan import DecoderPlan
from caraserve.model.safetensors_reader import TensorFile
from caraserve.model.torch_reader import TorchFile

_MOST_GGUF_HEADER_BYTES = 4 << 20


@contextmanager
def open_adapter(folder: Path, plan: DecoderPlan) -> Iterator[StoredAdapter]:
    """Opens an adapter's files. Raises AdapterRejected, or TensorFileError."""
    with open_file(folder) as file:
        if isinstance(file, GgufFile):
            yield gguf.translated(file, plan)
        elif file.name == MISTRAL_NAMES[1]:
            yield mistral.translated(load_fields(folder / MISTRAL_NAMES[0]), file, plan)
        else:
            yield peft_adapter(folder, file, plan)


def open_file(folder: Path) -> TensorFile | TorchFile | GgufFile:
    """Opens the file with an adapter's tensors. Raises AdapterRejected, or TensorFileError."""
    files = files_of(folder)
    if not files:
        try:
            reason = why_no_adapter(folder)
        except OSError as error:
            reason = f"the folder cannot be read: {error.strerror}"
        raise AdapterRejected(reason or "the folder has changed; try again")
    path = folder / files[-1]
    if path.suffix == GGUF_SUFFIX:
        return GgufFile(path, _MOST_GGUF_HEADER_BYTES)
    return TorchFile(path) if path.name == TORCH_NAME else TensorFile(path)


def peft_adapter(folder: Path, file: TensorFile | TorchFile, plan: DecoderPlan) -> StoredAdapter:
    """Returns the adapter of an open tensor file and the `adapter_config.json` beside it. Raises AdapterRejected, or
    TensorFileError."""
    fields = load_fields(folder / CONFIG_NAME)
    if mlx.wrote(fields):
        return mlx.translated(fields, file)
    return tinker.translated(fields, file, plan)
