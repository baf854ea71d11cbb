"""What `caraserve doctor` says of a machine, and of what a server would be started with."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from caraserve import demo
from caraserve.cli import doctor
from caraserve.cli.doctor import Configs, Finding, MachineFacts, examine
from caraserve.cli.options import OptionParser
from caraserve.config import SERVE_CONFIGS
from caraserve.cpu.kernel_cache import kernel_folder
from caraserve.gpu.driver.detect import Gpu, Installed
from caraserve.model.families import load_plan
from caraserve.util.units import human_bytes

GIB = 1 << 30
NONE = Installed(torch="", torch_cuda=None, cupy_cuda=None, triton=False)
SERVER = MachineFacts(
    python=(3, 12, 1),
    architecture="x86_64",
    cpu_flags=frozenset({"avx2", "fma", "avx512f", "f16c"}),
    cores=16,
    usable_cores=8,
    free_bytes=40 * GIB,
    memory_bytes=64 * GIB,
    limit_bytes=None,
    has_memfd=True,
    gpu=None,
    gpu_problem="",
    packages=NONE,
)
ALL = Installed("torch 2.11", 13, 13, triton=True)
A100 = Gpu("NVIDIA A100", 80, 13000, 80 << 30)


def configs(*words: str) -> Configs:
    words = words if "--port" in words else (*words, "--port", "0")
    return Configs(*OptionParser(SERVE_CONFIGS).parse_args(words).configs)


def found(what: str, *words: str, **facts: Any) -> Finding:
    """Returns the finding of that name on a machine with these facts, after checking that every line is one line."""
    findings = examine(replace(SERVER, **facts), configs(*words))
    assert not any("\n" in finding.found + finding.advice for finding in findings)
    return next(finding for finding in findings if finding.what == what)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_nothing_is_wrong_with_a_server_without_a_gpu_and_the_demo() -> None:
    findings = examine(SERVER, configs())
    assert {finding.state for finding in findings} == {"ok"}
    assert [finding.what for finding in findings] == [
        *("Python", "CPU", "memory", "shared memory", "kernel cache"),
        *("GPU", "torch", "CuPy", "Triton", "device"),
        *("address", "model", "options", "sizes", "files", "adapters"),
    ]


FACTS = {
    "python": ("Python", {"python": (3, 99, 0)}, "warning", "3.99"),
    "no avx": ("CPU", {"cpu_flags": frozenset()}, "warning", "no AVX2"),
    "no f16c": ("CPU", {"cpu_flags": frozenset({"avx2", "fma"})}, "warning", "--dtype"),
    "arm": ("CPU", {"cpu_flags": frozenset(), "architecture": "aarch64"}, "ok", "aarch64"),
    "one core": ("CPU", {"usable_cores": 1}, "warning", "1 of 16 cores"),
    "little memory": ("memory", {"free_bytes": GIB // 2}, "warning", "512.0 MiB free"),
    "container": ("memory", {"limit_bytes": 8 * GIB}, "warning", "--kv-cache-bytes"),
    "sandbox": ("shared memory", {"has_memfd": False}, "problem", "memfd_create"),
    "driver": ("GPU", {"gpu_problem": "the NVIDIA driver cannot be used: 999"}, "warning", "999"),
    "gpu": ("GPU", {"gpu": A100}, "ok", "A100, compute capability 8.0"),
    "cuda": ("driver", {"gpu": A100}, "ok", "CUDA 13.0"),
    "no packages": ("device", {"gpu": A100}, "warning", "pip install"),
    "all packages": ("device", {"gpu": A100, "packages": ALL}, "ok", "cuda"),
    "no cupy": ("CuPy", {"gpu": A100}, "warning", "not installed"),
    "too small": ("model", {"free_bytes": 1 << 20}, "problem", "1.0 MiB are free"),
}


@pytest.mark.parametrize(("what", "facts", "state", "says"), FACTS.values(), ids=FACTS)
def test_facts_of_a_machine(what: str, facts: dict[str, Any], state: str, says: str) -> None:
    finding = found(what, **facts)
    assert finding.state == state
    assert says in f"{finding.found}; {finding.advice}"


def test_a_kernel_cache_that_cannot_be_written_is_a_problem(cache: Path) -> None:
    (cache / "cache").write_text("a file where the folder should be")
    finding = found("kernel cache")
    assert (finding.state, "XDG_CACHE_HOME" in finding.advice) == ("problem", True)


def test_only_kernels_of_these_sources_count_as_compiled() -> None:
    def add_kernel(sources: Path) -> None:
        folder = sources / "caraserve.cpu"
        folder.mkdir(parents=True)
        (folder / f"attention.attend-1.py{sys.version_info.major}{sys.version_info.minor}.1.nbc").touch()

    add_kernel(kernel_folder().with_name("of_other_sources"))
    assert "has no kernels of this version" in found("kernel cache").found
    add_kernel(kernel_folder())
    assert "has kernels of this version" in found("kernel cache").found


def test_a_port_in_use_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        finding = found("address", "--port", str(other.getsockname()[1]))
    assert (finding.state, "another process" in finding.found) == ("problem", True)


def test_a_server_that_others_may_use_without_a_key_is_warned_of() -> None:
    finding = found("access", "--host", "0.0.0.0", "--port", "0")
    assert (finding.state, "--api-key" in finding.found) == ("warning", True)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_without_one_of_its_files_is_a_problem(missing: str, tmp_path: Path) -> None:
    for file in demo.model_folder().iterdir():
        if file.name != missing:
            (tmp_path / file.name).symlink_to(file)
    finding = found("model", str(tmp_path))
    assert (finding.state, missing in finding.found) == ("problem", True)


def test_quantised_weights_are_counted_as_the_device_stores_them(tmp_path: Path) -> None:
    for file in demo.model_folder().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale"] = tensors[name].to(torch.float8_e4m3fn), torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    plan = load_plan(tmp_path)
    here, gpu = found("model", str(tmp_path)), found("model", str(tmp_path), gpu=A100, packages=ALL)
    assert here.found == gpu.found
    assert here.found.endswith(f"weights of {human_bytes(plan.weight_bytes(2))} (fp8)")
    assert plan.weight_bytes(2) < 2 * plan.num_parameters


SIZES = {
    "defaults": ((), {}, "ok", "KV cache 8.0 GiB (4,194,304 tokens), adapters at most 5.0 GiB: 13.0 GiB of 40.0 GiB"),
    "full caches": (("--max-host-adapters-bytes", "40GiB"), {}, "warning", "adapters at most 41.0 GiB: 49.0 GiB of"),
    "KV cache": (("--kv-cache-bytes", "41GiB"), {}, "problem", "KV cache 41.0 GiB"),
    "container": ((), {"limit_bytes": 12 * GIB}, "warning", "of 12.0 GiB"),
    "GPU": ((), {"gpu": A100, "packages": ALL}, "ok", "of 72.0 GiB; about 72.0 GiB left"),
    "small GPU": ((), {"gpu": replace(A100, total_bytes=1 << 20), "packages": ALL}, "problem", "about 0 B left"),
}


@pytest.mark.parametrize(("words", "facts", "state", "says"), SIZES.values(), ids=SIZES)
def test_what_the_server_takes_of_the_memory_is_told_before_it_starts(
    words: tuple[str, ...], facts: dict[str, Any], state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caraserve.backend_factory.free_bytes", lambda: 40 * GIB)
    finding = found("sizes", *words, **facts)
    assert (finding.state, says in finding.found) == (state, True), finding


def test_adapters_are_counted_and_a_missing_one_is_a_problem() -> None:
    assert found("adapters").found.startswith("5 ")
    assert found("adapters", "--lora-modules", "a=/nowhere").state == "problem"


REFUSED = {
    "key file": ("keys", ("--api-key-file", "/nope"), "No such file"),
    "key file of another kind": ("keys", ("--api-key-file", str(demo.model_folder() / "config.json")), "`keys`"),
    "core": ("options", ("--lora-cpus", "8191"), "core 8191"),
    "KV cache": ("options", ("--kv-cache-bytes", "1k"), "too small"),
    "context": ("options", ("--max-model-len", "4k"), "1024 positions"),
    "registry": ("files", ("--registry", "/nope/x.db"), "--registry /nope/x.db"),
    "trace": ("files", ("--trace", "/nope/t.json"), "--trace '/nope/t.json'"),
    "profile": ("files", ("--profile", "/nope.json"), "/nope.json"),
    "routing": ("address", ("--routing", "auto"), "--peers"),
    "cluster": ("address", ("--peers", "10.0.0.1:8000"), "--cluster-secret-file"),
    "GPU": ("device", ("--device", "cuda"), "no NVIDIA driver"),
    "rank": ("adapters", ("--max-lora-rank", "1"), "above --max-lora-rank 1"),
}


@pytest.mark.parametrize(("what", "words", "says"), REFUSED.values(), ids=REFUSED)
def test_options_that_the_start_refuses_are_problems(what: str, words: tuple[str, ...], says: str) -> None:
    finding = found(what, *words)
    assert (finding.state, says in finding.found) == ("problem", True)


def test_files_that_the_start_would_make_are_checked_and_not_left(tmp_path: Path) -> None:
    registry, trace, old = tmp_path / "x.db", tmp_path / "t.json", tmp_path / "old.json"
    old.write_text("[")
    assert found("files", "--registry", str(registry), "--trace", str(trace)).state == "ok"
    assert found("files", "--trace", str(old)).state == "ok"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["old.json"]
    assert old.read_text() == "["


def test_the_configuration_and_tensors_of_adapters_are_checked_as_at_the_start(tmp_path: Path) -> None:
    poet, folder = demo.adapters_folder() / "poet", tmp_path / "adapters"
    kasa = folder / "kasa"
    kasa.mkdir(parents=True)
    config = json.loads((poet / "adapter_config.json").read_text())
    (kasa / "adapter_config.json").write_text(json.dumps(config | {"kasa_config": {"beta": 1}}))
    (kasa / "adapter_model.safetensors").symlink_to(poet / "adapter_model.safetensors")
    (folder / "poet").symlink_to(poet)
    named = found("adapters", "--lora-modules", f"x={kasa}")
    assert (named.state, "kasa_config" in named.found) == ("problem", True)
    in_folder = found("left out", "--adapters-dir", str(folder))
    assert in_folder.state == "warning"
    assert in_folder.found.startswith("1 of 2 folders in --adapters-dir would be left out: 'kasa': ")
    assert "kasa_config" in in_folder.found


def test_a_problem_ends_with_exit_code_1_and_is_printed_as_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.MachineFacts, "here", classmethod(lambda cls: SERVER))
    assert doctor.doctor(configs()) == 0
    capsys.readouterr()
    assert doctor.doctor(configs("/nowhere[bold]")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("problem")] == [
        "problem  model          model folder '/nowhere[bold]' does not exist; give a folder that holds config.json, "
        "tokenizer.json and safetensors weights, or a GGUF file"
    ]
    assert lines[-1] == "1 problem"


def test_the_command_needs_no_gpu_package_and_loads_no_heavy_one() -> None:
    code = (
        "import sys, json; heavy = ('torch', 'cupy', 'triton', 'numba')\n"
        "for name in heavy[:3]: sys.modules[name] = None\n"
        "from caraserve.cli.main import main\n"
        "status = main(['doctor', '--port', '0'])\n"
        "print(json.dumps([status, 'numba' in sys.modules]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == [0, False]
