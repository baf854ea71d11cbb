"""Which device is chosen, and the one-line reason why a GPU is not."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from caraserve.errors import ConfigError
from caraserve.gpu.driver import detect
from caraserve.gpu.driver.detect import DeviceChoice, Gpu, Installed, choose, look
from tests.gpu.stub_driver import Stub

H200 = Gpu("NVIDIA H200", 90, 13020, 139 << 30)
FOR_13 = Installed("torch 2.11.0", torch_cuda=13, cupy_cuda=13, triton=True)
FOR_12 = Installed("torch 2.10.0", torch_cuda=12, cupy_cuda=12, triton=True)
BARE = Installed("torch 2.13.0+cpu", torch_cuda=None, cupy_cuda=None, triton=False)

# Usable: the driver runs code built for its CUDA version or an older one.
GOOD = [
    (H200, FOR_13),
    (H200, FOR_12),
    (Gpu("NVIDIA A10", 86, 12040, 80 << 30), FOR_12),
    (Gpu("NVIDIA A100", 80, 14000, 80 << 30), FOR_13),
    (H200, Installed("torch 2.11.0", torch_cuda=13, cupy_cuda=0, triton=True)),
]

# Unusable GPUs, the reason given, and the commands in it.
BAD = [
    (H200, BARE, "NVIDIA H200 (driver of CUDA 13.2) lacks a torch for CUDA 13 (torch 2.13.0+cpu is built without CUDA) "
     "and CuPy and Triton: pip install --force-reinstall 'torch>=2.11,<2.14' && pip install 'caraserve[cuda13]'"),
    (H200, Installed("torch 2.11.0", 13, None, triton=True),
     "NVIDIA H200 (driver of CUDA 13.2) lacks CuPy: pip install 'caraserve[cuda13]'"),
    (H200, Installed("torch 2.11.0", 13, 13, triton=False),
     "NVIDIA H200 (driver of CUDA 13.2) lacks Triton: pip install 'caraserve[cuda13]'"),
    (H200, Installed("torch 2.13.0+cpu", None, 13, triton=True),
     "NVIDIA H200 (driver of CUDA 13.2) lacks a torch for CUDA 13 (torch 2.13.0+cpu is built without CUDA): "
     "pip install --force-reinstall 'torch>=2.11,<2.14'"),
    (Gpu("NVIDIA A10", 86, 12040, 80 << 30), FOR_13,
     "NVIDIA A10 (driver of CUDA 12.4) lacks a torch for CUDA 12 (torch 2.11.0 is built for CUDA 13) and a CuPy for "
     "CUDA 12: pip install --force-reinstall 'torch>=2.9,<2.11' && pip uninstall -y cupy-cuda13x && "
     "pip install 'caraserve[cuda12]'"),
    (Gpu("NVIDIA X", 100, 14010, 80 << 30), BARE,
     "NVIDIA X (driver of CUDA 14.1) lacks a torch for CUDA 13 (torch 2.13.0+cpu is built without CUDA) "
     "and CuPy and Triton: pip install --force-reinstall 'torch>=2.11,<2.14' && pip install 'caraserve[cuda13]'"),
    (H200, replace(FOR_13, lacks_for_c="a C compiler"),
     "NVIDIA H200 (driver of CUDA 13.2) lacks a C compiler, which Triton needs: apt-get install gcc libc6-dev"),
    (H200, Installed("torch 2.11.0", 13, None, triton=True, lacks_for_c="the C library's headers"),
     "NVIDIA H200 (driver of CUDA 13.2) lacks CuPy and the C library's headers, which Triton needs: "
     "pip install 'caraserve[cuda13]' && apt-get install libc6-dev"),
    (H200, replace(FOR_13, unwritable="/cache/triton cannot be written: Read-only file system"),
     "NVIDIA H200 needs a cache of kernels, and /cache/triton cannot be written: Read-only file system; set "
     "XDG_CACHE_HOME to another folder"),
    (Gpu("NVIDIA A10", 86, 11080, 80 << 30), FOR_12,
     "the NVIDIA driver is one of CUDA 11.8, and CUDA 12 is the least; update the driver"),
    (Gpu("Tesla T4", 75, 13000, 80 << 30), FOR_13,
     "Tesla T4 has compute capability 7.5, and 8.0 (A100, A10, RTX 30) is the least"),
]  # fmt: skip


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(("gpu", "installed"), GOOD)
def test_a_gpu_with_everything_it_needs_is_chosen(wanted: str, gpu: Gpu, installed: Installed) -> None:
    assert choose(wanted, gpu, "", installed) == DeviceChoice("cuda")


@pytest.mark.parametrize(("gpu", "installed", "words"), BAD)
def test_an_unusable_gpu_is_explained_and_auto_falls_back_to_the_cpu(
    gpu: Gpu, installed: Installed, words: str
) -> None:
    assert choose("auto", gpu, "", installed) == DeviceChoice("cpu", f"{words}; serving on the CPU")
    with pytest.raises(ConfigError) as refused:
        choose("cuda", gpu, "", installed)
    assert refused.value.message == f"--device cuda: {words}"
    assert "\n" not in words


def test_a_machine_without_a_gpu_uses_its_cpu_without_a_note() -> None:
    assert choose("auto", None, "", FOR_13) == DeviceChoice("cpu")
    with pytest.raises(ConfigError, match=r"^--device cuda: there is no NVIDIA driver on this machine$"):
        choose("cuda", None, "", FOR_13)


def test_a_driver_that_fails_is_explained() -> None:
    assert choose("auto", None, "the NVIDIA driver sees no GPU", FOR_13).note.startswith("the NVIDIA driver sees no")
    with pytest.raises(ConfigError, match=r"^--device cuda: the NVIDIA driver sees no GPU$"):
        choose("cuda", None, "the NVIDIA driver sees no GPU", FOR_13)


def test_device_cpu_does_not_look_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(detect, "look")
    assert detect.detect("cpu") == choose("cpu", H200, "", FOR_13) == DeviceChoice("cpu")


# --- looking ---


def test_another_process_queries_the_driver(library: Path) -> None:
    stub = Stub(library)
    assert look(stub.path) == (H200, "")
    assert stub.log == []  # this process must not start the driver, because it forks


def test_a_missing_driver_has_no_note() -> None:
    assert look("libcuda-of-no-version.so.1") == (None, "")


def test_an_unusable_driver_library_is_explained() -> None:
    assert look("libc.so.6") == (None, "the NVIDIA driver cannot be used: libc.so.6 lacks cuInit: it is too old")


def test_an_error_of_the_driver_is_quoted(library: Path) -> None:
    stub = Stub(library)
    stub.fail("cuInit", 2)
    refused = "the NVIDIA driver cannot be used: cuInit: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
    assert detect._answer(stub.path) == refused


def test_a_driver_that_dies_or_hangs_does_not_end_this_process(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], -11, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert look(str(library)) == (None, "the NVIDIA driver cannot be used: status -11")

    def hang(*arguments: object, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired([], timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert look(str(library)) == (None, "the NVIDIA driver did not start within 60 s")


def test_detection_imports_no_large_package() -> None:
    code = "import sys; from caraserve.gpu.driver import detect; detect.detect('auto'); detect.installed(has_gpu=False)"
    code += "; print(*sorted({'torch', 'cupy', 'triton', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# --- what is installed ---


def test_a_compiler_is_only_tried_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect.environment, "lacks_for_c", lambda include: "a C compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/triton")
    without, found = detect.installed(has_gpu=False), detect.installed()
    assert (without.lacks_for_c, without.unwritable) == ("", "")
    assert found.lacks_for_c == "a C compiler"
    assert found.unwritable == "/dev/null/triton cannot be written: Not a directory"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = None", None),
        ("cuda: Optional[str] = '13.0'", 13),
        ("cuda: str | None = '12.8'", 12),
        ("cuda = '12.6'", 12),
        ("hip: Optional[str] = '6.4'", None),
    ],
)
def test_the_cuda_version_of_torch_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cuda: int | None
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{text}\n")
    monkeypatch.setattr(detect, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert detect.installed(has_gpu=False).torch_cuda == cuda


@pytest.mark.parametrize(
    ("names", "cuda"), [(["numpy", "cupy-cuda13x"], 13), (["CuPy-CUDA12x"], 12), (["cupy"], 0), ([], None)]
)
def test_the_cuda_version_of_cupy_is_read_from_its_name(
    monkeypatch: pytest.MonkeyPatch, names: list[str], cuda: int | None
) -> None:
    monkeypatch.setattr(detect, "find_spec", lambda name: SimpleNamespace(origin=None) if names else None)
    distributions = [SimpleNamespace(metadata={"Name": name}) for name in names]
    monkeypatch.setattr(detect.metadata, "distributions", lambda: distributions)
    assert detect.installed(has_gpu=False).cupy_cuda == cuda
