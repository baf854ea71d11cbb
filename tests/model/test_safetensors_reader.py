"""safetensors files: values arrive bit for bit, and no file makes the reader trust it."""

import errno
import json
import os
import resource
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from caraserve.cpu.shared_memory import SharedRegion
from caraserve.errors import ConfigError
from caraserve.model.dtype import Dtype
from caraserve.model.opened_file import TensorFileError
from caraserve.model.safetensors_reader import TensorFile, weight_files

PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file in the safetensors format with `header` as it is, however wrong: an object, or its JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_a_model_may_have_more_tensors_than_an_adapter(tmp_path: Path) -> None:
    header = {f"{'experts.' * 8}{at}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for at in range(5000)}
    path = write_file(tmp_path / "model.safetensors", header)
    assert weight_files(tmp_path) == dict.fromkeys(header, path)
    with pytest.raises(TensorFileError, match="at most 524288 are read"):
        TensorFile(path)


@pytest.mark.parametrize(
    ("torch_dtype", "dtype", "bits"),
    [
        (torch.float32, Dtype.F32, torch.int32),
        (torch.float16, Dtype.F16, torch.int16),
        (torch.bfloat16, Dtype.BF16, torch.int16),
    ],
)
def test_values_arrive_bit_for_bit(tmp_path: Path, torch_dtype: torch.dtype, dtype: Dtype, bits: torch.dtype) -> None:
    values = torch.tensor([[1.5, -0.0, float("inf")], [float("nan"), 1e-7, 65504.0]]).to(torch_dtype)
    save_file({"w": values}, tmp_path / "model.safetensors")
    with TensorFile(tmp_path / "model.safetensors") as file:
        raw = file.raw("w")
        assert (file.names, file.shape("w"), file.dtype("w")) == (["w"], (2, 3), dtype)
    assert raw.dtype == dtype.storage
    assert raw.tobytes() == values.view(bits).numpy().tobytes()


def test_each_tensor_is_read_from_its_own_place(tmp_path: Path) -> None:
    tensors = {name: torch.full((3, 5), float(place)) for place, name in enumerate("cab")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with TensorFile(tmp_path / "model.safetensors") as file:
        assert sorted(file.names) == ["a", "b", "c"]
        assert {name: float(file.raw(name)[2, 4]) for name in file.names} == {"c": 0.0, "a": 1.0, "b": 2.0}


def test_data_need_not_be_aligned(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for padding in range(4):
        path = write_file(
            tmp_path / "model.safetensors", header + b" " * padding, np.array([3, 4], np.float32).tobytes()
        )
        with TensorFile(path) as file:
            np.testing.assert_array_equal(file.raw("w"), np.array([3, 4], np.float32))


@pytest.mark.parametrize(("shape", "size"), [([], 1), ([0, 4], 0)])
def test_scalars_and_empty_tensors_are_tensors(tmp_path: Path, shape: list[int], size: int) -> None:
    header = {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * size]}}
    with TensorFile(write_file(tmp_path / "model.safetensors", header, bytes(4 * size))) as file:
        assert file.raw("w").shape == tuple(shape)


def test_values_outlive_the_file_and_belong_to_the_caller(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"w": PAIR}, np.array([1, 2], np.float32).tobytes())
    with TensorFile(path) as file:
        raw = file.raw("w")
    path.write_bytes(b"")  # a mapping of the file would now end the process
    np.testing.assert_array_equal(raw, np.array([1, 2], np.float32))


MALFORMED: dict[str, tuple[Any, bytes]] = {
    "not JSON": (b"{nonsense", b""),
    "not an object": ([1, 2], b""),
    "no fields": ({"w": {}}, bytes(8)),
    "unknown dtype": ({"w": PAIR | {"dtype": "COMPLEX7"}}, bytes(8)),
    "shape larger than its bytes": ({"w": PAIR | {"shape": [3]}}, bytes(8)),
    "negative shape": ({"w": PAIR | {"shape": [-2]}}, bytes(8)),
    "shape whose product overflows": ({"w": PAIR | {"shape": [2**63, 2**63, 4]}}, bytes(8)),
    "a terabyte declared": ({"w": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}, bytes(8)),
    "data cut short": ({"w": PAIR}, bytes(7)),
    "data left over": ({"w": PAIR}, bytes(9)),
    "overlapping": ({"w": PAIR, "v": PAIR | {"data_offsets": [4, 12]}}, bytes(12)),
    "a gap": ({"w": PAIR, "v": PAIR | {"data_offsets": [12, 20]}}, bytes(20)),
    "offsets the wrong way round": ({"w": PAIR | {"data_offsets": [8, 0]}}, bytes(8)),
    "negative offset": ({"w": PAIR | {"data_offsets": [-8, 0]}}, bytes(8)),
    "nested beyond any stack": (b"[" * 100_000, b""),
    "not text": (b"\xff\xfe\xfd\xfc", b""),
    "nested beyond any stack inside a tensor": (b'{"w":' + b"[" * 100_000, b""),
    "more after its end": (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}{}', bytes(8)),
    "a comma too many": (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},}', bytes(8)),
    "a field twice": (b'{"w":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "a name that is not text": (b'{{}:{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "a shape that is no list": ({"w": PAIR | {"shape": 2}}, bytes(8)),
    "one name twice": (
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    header, data = MALFORMED[kind]
    path = write_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(TensorFileError, match=r"^model\.safetensors is not a valid safetensors file: "):
        TensorFile(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8, struct.pack("<Q", 2**63), b"\xff" * 8])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TensorFileError, match="not a valid safetensors file"):
        TensorFile(tmp_path / "model.safetensors")


def test_any_truncation_is_refused(tmp_path: Path) -> None:
    whole = write_file(tmp_path / "whole", {"w": PAIR}, bytes(8)).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(TensorFileError):
            TensorFile(tmp_path / "cut")


def test_memory_does_not_grow_with_a_claimed_size(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**39))
        file.truncate(2**40)  # sparse: the file has that size and takes no space
    tracemalloc.start()
    try:
        with pytest.raises(TensorFileError, match="its header has 549755813888 bytes; at most"):
            TensorFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "BOOL"])
def test_an_unsupported_dtype_is_named(tmp_path: Path, dtype: str) -> None:
    size = 8 if dtype == "F64" else 1
    header = {"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}
    with TensorFile(write_file(tmp_path / "model.safetensors", header, bytes(size))) as file:
        with pytest.raises(TensorFileError, match=f"tensor w has dtype {dtype}"):
            file.raw("w")
        assert file.shape("w") == (1,)


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    with (
        TensorFile(write_file(tmp_path / "model.safetensors", {"w": PAIR}, bytes(8))) as file,
        pytest.raises(TensorFileError, match="has no tensor v"),
    ):
        file.raw("v")


def test_metadata_is_not_a_tensor(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "w": PAIR}
    with TensorFile(write_file(tmp_path / "model.safetensors", header, bytes(8))) as file:
        assert file.names == ["w"]
        with pytest.raises(TensorFileError, match="has no tensor __metadata__"):
            file.shape("__metadata__")


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(TensorFileError, match="is not a regular file"):
        TensorFile(tmp_path / "model.safetensors")


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_devices_and_folders_are_refused(path: str) -> None:
    with pytest.raises(TensorFileError, match="is not a regular file"):
        TensorFile(Path(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="cannot be opened: No such file"):
        TensorFile(tmp_path / "model.safetensors")


def test_a_file_cut_short_while_open_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"w": PAIR}, bytes(8))
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(TensorFileError, match="was cut short"):
            file.raw("w")


def test_a_file_replaced_under_its_name_is_read_as_it_was(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"w": PAIR}, np.array([1, 2], np.float32).tobytes())
    with TensorFile(path) as file:
        write_file(tmp_path / "new", {"v": PAIR}, bytes(8)).replace(path)
        np.testing.assert_array_equal(file.raw("w"), np.array([1, 2], np.float32))


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 12345\n")
    with pytest.raises(TensorFileError, match="it is a pointer of Git LFS; `git lfs pull` fetches"):
        TensorFile(path)


def test_a_header_too_long_to_parse_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", (512 << 10) + 1))
        file.truncate(64 << 20)  # it is all there, so only its length speaks against it
    with pytest.raises(TensorFileError, match="its header has 524289 bytes; at most 524288 are read"):
        TensorFile(path)


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}},
        {"w" * 600: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"w" * 100_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"__metadata__": {"notes": "n" * 100_000}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    ],
    ids=["100,000 dimensions", "9 dimensions", "a name of 600", "a name of 100,000", "metadata of 100,000"],
)
def test_a_long_name_or_shape_is_refused_with_a_short_message(tmp_path: Path, header: Any) -> None:
    path = write_file(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(TensorFileError, match=r"dimensions|characters") as caught:
        TensorFile(path)
    assert len(str(caught.value)) < 500


def test_an_adapter_of_every_module_of_126_layers_is_read(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{at}.self_attn.q_proj.lora_A.default.weight" for at in range(126 * 14)]
    header = {
        name: {"dtype": "BF16", "shape": [1, 8], "data_offsets": [16 * at, 16 * at + 16]}
        for at, name in enumerate(names)
    }
    with TensorFile(write_file(tmp_path / "model.safetensors", header, bytes(16 * len(names)))) as file:
        assert file.names == names


def test_a_file_may_have_no_tensors(tmp_path: Path) -> None:
    with TensorFile(write_file(tmp_path / "model.safetensors", b"{ } ")) as file:
        assert file.names == []


def test_a_file_written_while_open_is_detected(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"w": PAIR}, bytes(8))
    with TensorFile(path) as file:
        file.check_unchanged()
        with path.open("ab") as other:
            other.write(b"more")
        with pytest.raises(TensorFileError, match="was changed while it was being read"):
            file.check_unchanged()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_refused_or_closed_file_leaves_no_descriptor(tmp_path: Path) -> None:
    good = write_file(tmp_path / "good", {"w": PAIR}, bytes(8))
    bad = write_file(tmp_path / "bad", {"w": PAIR}, bytes(7))
    before = open_descriptors()
    for _ in range(20):
        TensorFile(good).close()
        with pytest.raises(TensorFileError):
            TensorFile(bad)
    assert open_descriptors() == before


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    file = TensorFile(write_file(tmp_path / "model.safetensors", {"w": PAIR}, bytes(8)))
    file.close()
    with (tmp_path / "other").open("wb") as other:  # takes the descriptor that has become free
        file.close()
        other.write(b"still open")
        assert os.fstat(other.fileno()).st_ino != 0


def test_a_disk_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with TensorFile(write_file(tmp_path / "model.safetensors", {"w": PAIR}, bytes(8))) as file:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(TensorFileError, match=r"^model\.safetensors: tensor w cannot be read: Input/output error$"):
            file.raw("w")


class TestWeightFiles:
    """Which file of a model's folder holds which tensor."""

    def test_a_single_file_holds_all_of_its_tensors(self, tmp_path: Path) -> None:
        path = write_file(tmp_path / "model.safetensors", {"w": PAIR}, bytes(8))
        assert weight_files(tmp_path) == {"w": path}

    def test_tensors_are_found_through_the_index(self, tmp_path: Path) -> None:
        write_index(tmp_path, {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
        assert weight_files(tmp_path) == {
            "a": tmp_path / "model-1.safetensors",
            "b": tmp_path / "model-2.safetensors",
        }

    @pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "..", ".", "", "sub/model.safetensors"])
    def test_an_index_cannot_lead_out_of_the_folder(self, tmp_path: Path, file: str) -> None:
        write_index(tmp_path, {"weight_map": {"a": file}})
        with pytest.raises(TensorFileError, match="is not a file of the folder"):
            weight_files(tmp_path)

    @pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map": 3}', b"[" * 100_000, b"\xff"])
    def test_a_malformed_index_is_refused(self, tmp_path: Path, index: bytes) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(index)
        with pytest.raises(TensorFileError, match="no valid weight_map"):
            weight_files(tmp_path)

    def test_a_huge_index_is_not_read(self, tmp_path: Path) -> None:
        with (tmp_path / "model.safetensors.index.json").open("wb") as file:
            file.truncate(2**40)
        with pytest.raises(TensorFileError, match="is larger than"):
            weight_files(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
    def test_pickles_are_never_read(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"cposix\nsystem\n")
        with pytest.raises(TensorFileError, match=f"{name}; pickle files are never read"):
            weight_files(tmp_path)

    def test_a_folder_without_weights_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TensorFileError, match=f"{tmp_path.name} has neither"):
            weight_files(tmp_path)


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_limit_of_this_process_is_not_the_files_fault(tmp_path: Path) -> None:
    """The library that checks headers maps a file of the same size in memory."""
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(1 << 20)}, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(TensorFileError, match=r"cannot be checked: .*4\.0 MiB.*raise ulimit -f"):
            TensorFile(path)
        with pytest.raises(ConfigError, match=r"8\.0 MiB of shared memory: .*raise ulimit -f"):
            SharedRegion(8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
