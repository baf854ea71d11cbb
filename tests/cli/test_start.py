"""Starts of the real command: other servers' start lines, without torch, and ended by Ctrl-C while it starts."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from caraserve import demo

MODEL, ADAPTERS = str(demo.model_folder()), demo.adapters_folder()
# Serving on a CPU must work where torch is not installed.
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from caraserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def started(words: Sequence[str], **environment: str) -> "subprocess.Popen[str]":
    """The command in a session of its own, as a terminal would start it; its output comes as one stream."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", WITHOUT_TORCH, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    )


def read_until(process: "subprocess.Popen[str]", mark: str) -> list[str]:
    """What it prints up to a line with `mark`."""
    assert process.stdout is not None
    killer = threading.Timer(120, process.kill)  # a mark that never comes fails the test, not the run
    killer.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if mark in line:
                return lines
        raise AssertionError(f"ended with {process.wait()}: {lines}")
    finally:
        killer.cancel()


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


LINES = {
    # vLLM's LoRA guide and the InferencePool guides, with --model, several names and a list of objects.
    "vllm": (
        [
            *("--model", MODEL, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "64", "--max-cpu-loras", "12"),
            *("--tensor-parallel-size", "1", "--compilation-config", "3", "--served-model-name", "demo", "meta/demo"),
            *("--lora-modules", json.dumps([{"name": "x", "path": f"{ADAPTERS}/poet", "base_model_name": "demo"}])),
        ],
        {},
    ),
    "kserve": (
        [
            *("--model_name=demo", f"--model_dir={MODEL}", "--enable_lora", "--dtype=half", "--max-model-len", "1k"),
            *("--lora-modules", f"x={ADAPTERS}/poet", f"y={ADAPTERS}/chef"),
        ],
        {},
    ),
    "nim": (
        [MODEL, "--served-model-name", "demo"],
        {"NIM_PEFT_SOURCE": str(ADAPTERS), "NIM_PEFT_REFRESH_INTERVAL": "3600", "NIM_MAX_LORA_RANK": "64"},
    ),
    "trl": (
        [
            *("--model", MODEL, "--gpu_memory_utilization", "0.85", "--enable_prefix_caching", "true"),
            *("--max_model_len", "1000", "--enforce_eager", "True", "--served-model-name", "demo"),
            *("--data_parallel_size", "1"),
        ],
        {},
    ),
}


# By options with values of every form, and by the environment. A start takes 2 s of a core.
ALWAYS = ("vllm", "nim")


@pytest.mark.parametrize(
    ("words", "environment"),
    [pytest.param(*line, id=name, marks=() if name in ALWAYS else pytest.mark.slow) for name, line in LINES.items()],
)
def test_command_lines_of_other_servers_guides_work_without_torch(
    words: list[str], environment: dict[str, str]
) -> None:
    process = started(["serve", *words, "--port", "0", "--lora-cpus", "0"], **environment)
    try:
        lines = read_until(process, "try:")
        url = next(line for line in lines if "ready at" in line).split("ready at ")[1].split()[0]
        assert "has no effect" in "".join(lines)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            cards = json.load(answer)["data"]
        models, formats = {card["id"] for card in cards}, {card["weights"] for card in cards if not card["parent"]}
        assert f"M parameters in {formats.pop()}, on " in "".join(lines)
        assert "demo" in models
        for name in models | ({"meta/demo"} & set(words)):
            body = json.dumps({"model": name, "prompt": "The sea", "max_tokens": 2}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 2
        process.send_signal(signal.SIGINT)
        assert "30 s for those running, which a second Ctrl-C" in read_until(process, "draining")[-1]
    finally:
        end(process)


def family(pid: int) -> set[int]:
    """Processes of the session that began with `pid`."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def test_the_benchmark_that_compares_with_torch_names_what_to_install() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "bench", "lora"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert "`test` extra" in line


INTERRUPTED_AT_AN_IMPORT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "caraserve.config":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("caraserve", run_name="__main__")
"""


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_AN_IMPORT], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("words", "mark"),
    [(["serve", "--port", "0"], "compiling CPU kernels"), (["profile"], "weights loaded")],
    ids=["compiling", "measuring"],
)
def test_ctrl_c_during_a_start_ends_it_at_once_with_one_line(words: list[str], mark: str, tmp_path: Path) -> None:
    """While kernels are compiled for the first time; and while the machine is measured, which has workers."""
    process = started(words, **({"XDG_CACHE_HOME": str(tmp_path)} if "kernels" in mark else {}))
    try:
        read_until(process, mark)
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=10)
        assert process.returncode == 130
        assert [line for line in rest.splitlines() if " I " not in line] == ["caraserve: interrupted"]
        assert family(process.pid) == set()
    finally:
        end(process)
