"""Files of torch.save are read without unpickling; hostile and damaged ones are refused."""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caraserve.model.dtype import Dtype
from caraserve.model.opened_file import TensorFileError
from caraserve.model.torch_reader import TorchFile

BIG = torch.arange(24.0).reshape(4, 6)
LINEAR = torch.nn.Linear(3, 2)

WRITTEN: dict[str, Any] = {
    "dictionary": {"a.lora_A.weight": torch.randn(4, 8), "a.lora_B.weight": torch.randn(8, 4)},
    "ordered, 16 bits": OrderedDict(x=torch.randn(4, 8).bfloat16(), y=torch.randn(2).half()),
    "a module's state": LINEAR.state_dict(),
    "parameters": {"p": torch.nn.Parameter(torch.randn(2, 2)), "q": torch.nn.Parameter(torch.ones(1), False)},
    "views": {"rows": BIG[1:], "transposed": BIG.T, "columns": BIG[:, 2:5], "one": BIG[2, 3], "whole": BIG},
    "three dimensions": {"w": torch.randn(2, 3, 4).permute(2, 0, 1)},
}


def save(folder: Path, content: Any, **options: Any) -> Path:
    torch.save(content, folder / "adapter_model.bin", **options)
    return folder / "adapter_model.bin"


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", WRITTEN)
def test_tensors_are_those_that_torch_wrote(tmp_path: Path, kind: str, protocol: int) -> None:
    path = save(tmp_path, WRITTEN[kind], pickle_protocol=protocol)
    with TorchFile(path) as file:
        assert list(file.names) == list(WRITTEN[kind])
        for name, tensor in WRITTEN[kind].items():
            theirs = tensor.detach().contiguous()
            bits = theirs.view(torch.int16).numpy().view(np.uint16) if theirs.itemsize == 2 else theirs.numpy()
            assert file.shape(name) == tuple(theirs.shape)
            assert file.dtype(name) is {4: Dtype.F32, 2: file.dtype(name)}[theirs.itemsize]
            np.testing.assert_array_equal(file.raw(name), bits)
            if theirs.ndim:
                np.testing.assert_array_equal(file.rows(name, 1, len(bits)), bits[1:])
        file.check_unchanged()


def test_dtypes_are_told_apart(tmp_path: Path) -> None:
    with TorchFile(save(tmp_path, {"b": BIG.bfloat16(), "h": BIG.half(), "d": BIG.double()})) as file:
        assert [file.dtype(name) for name in "bh"] == [Dtype.BF16, Dtype.F16]
        with pytest.raises(TensorFileError, match="tensor d has dtype F64; F32, F16 and BF16 are supported"):
            file.raw("d")


class Hostile:
    """An object whose unpickling runs a command."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made


def archive(data: bytes, *, storage: bytes = bytes(96), pickles: int = 1, **options: Any) -> bytes:
    """Returns a file with a pickle and one storage."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", **options) as made:
        for number in range(pickles):
            made.writestr(f"{'archive' if number == 0 else 'other'}/data.pkl", data)
        made.writestr("archive/data/0", storage)
    return written.getvalue()


def pickled(offset: int = 0, shape: Any = (4, 6), strides: Any = (6, 1), numel: int = 24, name: Any = "t") -> bytes:
    """Returns the pickle of a dictionary with one tensor."""

    class Written(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if value is BIG else None

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (BIG, offset, shape, strides, False, OrderedDict())

    found = io.BytesIO()
    Written(found, protocol=2).dump({name: Tensor()})
    return found.getvalue()


def test_a_pickle_made_by_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(archive(pickled(), storage=BIG.numpy().tobytes()))
    with TorchFile(tmp_path / "x.bin") as file:
        np.testing.assert_array_equal(file.raw("t"), BIG.numpy())


def test_one_row_may_have_any_stride(tmp_path: Path) -> None:
    data = pickled(shape=(1, 24), strides=(1 << 100, 1))
    (tmp_path / "x.bin").write_bytes(archive(data, storage=BIG.numpy().tobytes()))
    with TorchFile(tmp_path / "x.bin") as file:
        np.testing.assert_array_equal(file.raw("t"), BIG.numpy().reshape(1, 24))


def swapped(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new)


def dumped(value: Any) -> bytes:
    return archive(pickle.dumps(value, protocol=2))


def old_format() -> bytes:
    written = io.BytesIO()
    torch.save({"x": BIG}, written, _use_new_zipfile_serialization=False)
    return written.getvalue()


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a command": (lambda: dumped({"x": Hostile(os.system, "true")}), "wants to load posix.system; only tensors"),
    "an evaluation": (lambda: dumped({"x": Hostile(eval, "1")}), "wants to load __builtin__.eval; only tensors are re"),
    "a module": (lambda: dumped(LINEAR), "wants to load torch.nn.modules.linear.Linear; only tensors"),
    "a call of a dictionary": (lambda: archive(b"\x80\x02ccollections\nOrderedDict\n(K\x01tR."), "other than a tensor"),
    "a call of text": (lambda: archive(b"\x80\x02X\x01\x00\x00\x00a)R."), "calls something unknown"),
    "another storage": (lambda: dumped_with_ids(("module", 1)), "refers to something other than a storage"),
    "a storage of no type": (lambda: dumped_with_ids(("storage", 1, "0", "cpu", 1)), "a storage of an unknown type"),
    "attributes": (lambda: archive(b"\x80\x02]}b."), "sets attributes of an object"),
    "a number": (lambda: dumped({"x": 1}), "holds 'x', which is no tensor"),
    "a nested dictionary": (lambda: dumped({"x": {"y": 1}}), "holds 'x', which is no tensor"),
    "a list": (lambda: dumped([1]), "holds no dictionary of tensors"),
    "nothing": (lambda: dumped({}), "holds no dictionary of tensors"),
    "a name that takes forever to hash": (
        lambda: archive(b"\x80\x02})" + 64 * b"q\x00h\x00\x86" + b"K\x01s."),
        "has a name that is not text",
    ),
    "a name twice": (lambda: archive(b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u."), "holds 'a' twice"),
    "an unknown operation": (lambda: archive(b"\x80\x02(I1\nI2\nd."), "has the operation INT; only tensors are read"),
    "a pickle cut short": (lambda: archive(pickled()[:-9]), "is not a valid file of PyTorch"),
    "a pickle without end": (lambda: archive(b"\x80\x02}"), "is not a valid file of PyTorch"),
    "marks that are not there": (lambda: archive(b"\x80\x02tu."), "its pickle is damaged"),
    "a mark above the stack": (lambda: archive(b"\x80\x02}((K\x01]0u."), "has the operation POP"),
    "memory of another file": (lambda: archive(b"\x80\x02h\x05."), "its pickle is damaged"),
    "operations without end": (lambda: archive(b"\x80\x02" + b"}" * (1 << 20)), "has more than 500000 operations"),
    "an empty pickle": (lambda: archive(b""), "is not a valid file of PyTorch"),
    "a tensor after its storage": (lambda: archive(pickled(offset=1)), "tensor 't' lies outside of its storage"),
    "a tensor before its storage": (lambda: archive(pickled(offset=-1)), "tensor 't' lies outside of its storage"),
    "strides that overlap": (lambda: archive(pickled(strides=(3, 1))), "of tensor 't' overlap"),
    "one element many times": (lambda: archive(pickled(shape=(10**9,), strides=(0,))), "of tensor 't' overlap"),
    "a negative stride": (lambda: archive(pickled(offset=23, strides=(-6, -1))), "and strides [-6, -1]"),
    "an empty tensor": (lambda: archive(pickled(shape=(0, 6))), "has shape [0, 6]"),
    "a stride too few": (lambda: archive(pickled(strides=(6,))), "has shape [4, 6] and strides [6]"),
    "many dimensions": (lambda: archive(pickled(shape=(1,) * 9, strides=(1,) * 9)), "a tensor has 9 dimensions"),
    "a shape of text": (lambda: archive(pickled(shape="ab")), "makes something other than a tensor"),
    "a scattered tensor": (lambda: archive(pickled(shape=(2,), strides=(23,))), "lies scattered in its storage"),
    "a storage of another size": (lambda: archive(pickled(numel=25)), "the storage of tensor 't' has 96 bytes"),
    "a storage of negative size": (lambda: archive(pickled(numel=-1)), "the storage of tensor 't' has 96 bytes"),
    "no storage": (lambda: swapped(archive(pickled()), b"data/0", b"data/1"), "the storage of tensor 't' has -1 bytes"),
    "a long name": (lambda: archive(pickled(name="n" * 600)), "a name of 600 characters"),
    "a name that cannot be written": (
        lambda: swapped(archive(pickled(name="abc")), b"abc", b"\xed\xa0\x80"),
        "a name that is not text",
    ),
    "two pickles": (lambda: archive(pickled(), pickles=2), "it has 2 pickles"),
    "no pickle": (lambda: archive(pickled(), pickles=0), "it has 0 pickles"),
    "compressed entries": (lambda: archive(pickled(), compression=zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "another name in its place": (lambda: archive(pickled()).replace(b"/data/0", b"/data/9", 1), "is not where"),
    "a zip cut short": (lambda: archive(pickled())[:-30], "is not a valid file of PyTorch"),
    "no zip": (lambda: b"PK" * 500, "is not a valid file of PyTorch"),
    "an empty file": (lambda: b"", "is not a valid file of PyTorch"),
    "the old format": (old_format, "is in PyTorch's format from before 1.6; load it and save it as safetensors"),
    "a large directory": (lambda: huge_directory(), "its directory claims"),
}  # fmt: skip


def dumped_with_ids(identity: Any) -> bytes:
    class Written(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return identity if value is BIG else None

    found = io.BytesIO()
    Written(found, protocol=2).dump({"x": BIG})
    return archive(found.getvalue())


def huge_directory() -> bytes:
    """Returns a file whose end says that 16 MiB of directory precede it."""
    size = 16 << 20
    return bytes(size) + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, size, 0, 0)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.timeout(10)
def test_what_is_not_tensors_alone_is_refused_and_said(tmp_path: Path, kind: str) -> None:
    make, why = REFUSED[kind]
    path = tmp_path / "adapter_model.bin"
    path.write_bytes(make())
    with pytest.raises(TensorFileError) as caught:
        TorchFile(path)
    assert str(caught.value).startswith("adapter_model.bin ")
    assert why in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_changed_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, {"x": BIG})
    with TorchFile(path) as file:
        os.utime(path, ns=(0, 0))
        with pytest.raises(TensorFileError, match="was changed while it was being read"):
            file.check_unchanged()
