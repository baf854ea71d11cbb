"""What CUDA, torch, Triton and CuPy find around them."""

import os
import sys
from pathlib import Path

import pytest

from caraserve.gpu.driver import environment

SET = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "TRITON_CACHE_DIR",
    "CUPY_CACHE_DIR",
    "TRITON_LIBCUDA_PATH",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SET:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_cuda_starts_with_many_connections_and_loads_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    environment.prepare_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


def test_torch_keeps_cublas_workspaces_which_a_graph_must_not_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "0")
    environment.prepare_environment()
    assert os.environ["TORCH_CUBLAS_WORKSPACE_CACHE"] == "1"


def test_all_caches_are_in_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.prepare_environment()
    folder = tmp_path / "cache" / "caraserve"
    assert {Path(os.environ[name]).parent for name in SET[2:4]} == {folder}
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")  # by the user
    environment.prepare_environment()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


# --- the driver's library ---


def test_triton_finds_the_library_that_is_loaded(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LIBRARY", str(library))
    monkeypatch.setattr(environment.library_folder, "__defaults__", (str(library),))
    environment.prepare_environment()
    assert os.environ["TRITON_LIBCUDA_PATH"] == str(library.parent)


def test_a_link_to_the_library_is_found_beside_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's file has a version in its name, and a linker asks for the name without it."""
    link = library.with_name(f"{library.name}.1")
    link.symlink_to(library)
    try:
        assert environment.library_folder(str(link)) == library.parent
    finally:
        link.unlink()


def test_without_a_driver_triton_is_told_nothing() -> None:
    assert environment.library_folder("libcuda-of-no-version.so.1") is None


# --- a C compiler ---


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A folder with a header that needs one of the C library."""
    (tmp_path / "Python.h").write_text("#include <stdlib.h>")
    return tmp_path


def compiler(folder: Path, name: str, status: int) -> Path:
    """Writes a compiler that reads its input and ends with a status."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys\nassert 'Python.h' in sys.stdin.read()\nsys.exit({status})")
    path.chmod(0o755)
    return path


def test_a_compiler_and_headers_are_enough(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(headers))
    for name in ("clang", "gcc"):
        found = compiler(headers, name, 0)
        assert environment.lacks_for_c(headers) == ""
        found.unlink()


def test_what_is_missing_is_named_and_a_package_brings_it(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(headers))
    missing = [environment.lacks_for_c(headers)]
    compiler(headers, "gcc", 1)
    missing.append(environment.lacks_for_c(headers))
    missing.append(environment.lacks_for_c(headers / "none"))
    assert missing == ["a C compiler", "the C library's headers", "Python's headers"]
    assert set(missing) == set(environment.DEBIAN)


def test_the_compiler_that_the_user_names_comes_first(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(headers))
    compiler(headers, "gcc", 1)
    monkeypatch.setenv("CC", str(compiler(headers, "mine", 0)))
    assert environment.lacks_for_c(headers) == ""
    monkeypatch.setenv("CC", "no-such-compiler")
    assert environment.lacks_for_c(headers) == "a C compiler"


def test_pythons_headers_are_where_triton_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert environment.python_headers().name.startswith(version)
    monkeypatch.setattr(environment.sysconfig, "get_default_scheme", lambda: "posix_local")
    assert "local" not in environment.python_headers().parts[-3:]
