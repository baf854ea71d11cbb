"""Tests of `caraserve bench serve`, `modes`, `compare` and `presets` as commands."""

import csv
import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from caraserve.bench.report.tables import write_document
from caraserve.cli.main import main
from tests.bench.fake_endpoint import fake_process

PROFILE = Path(__file__).parents[1] / "profile.json"
BUSY = ("--calm-cores", "1000")  # other tests may run beside these
QUICK = ("--num-prompts", "12", "--request-rate", "100", "--random-input-len", "8", "--random-output-len", "4")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in this process, which has imported it already."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as errors:
        try:
            code: int | str | None = main(["bench", *arguments])
        except SystemExit as end:  # argparse's
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), errors.getvalue())


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def alive(mark: str) -> list[str]:
    """Returns all processes with this mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"CARASERVE_TEST_MARK={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_process("ttft-5-tpot-1") as (url, _):
        yield url


def requests_of(url: str) -> list[dict[str, list[int]]]:
    """Returns all completed requests of the fake endpoint."""
    with urllib.request.urlopen(f"{url}/log") as answer:
        requests: list[dict[str, list[int]]] = json.load(answer)
    return requests


def test_an_endpoint_is_measured_and_its_report_is_saved_without_keys(url: str, tmp_path: Path) -> None:
    arguments = (*QUICK, "--slo", "ttft:1000", "--api-key", "sesame", "--seed", "7")
    done = bench("serve", "--url", url, *arguments, "--save", str(tmp_path))
    document = last_line(done)
    assert json.loads((tmp_path / "serve.json").read_text()) == document
    rows = list(csv.DictReader((tmp_path / "requests.csv").read_text().splitlines()))
    assert len(rows) == 12
    assert "TTFT" in done.stdout
    assert (document["seed"], document["arguments"]["num_prompts"]) == (7, 12)
    assert "sesame" not in done.stdout


@pytest.mark.parametrize(
    ("is_terminal", "asked", "shown"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_the_report_as_json_is_for_programs(
    is_terminal: bool, asked: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = StringIO()
    monkeypatch.setattr(printed, "isatty", lambda: is_terminal)
    with redirect_stdout(printed):
        write_document({"runs": []}, asked)
    assert bool(printed.getvalue()) == shown


def test_without_an_endpoint_a_server_is_started_and_ended() -> None:
    mark = uuid.uuid4().hex
    arguments = ("serve", *QUICK, "--slo-scale", "100", "--", "--loading-mode", "ondemand", "--cpu-threads", "1")
    command = [sys.executable, "-m", "caraserve", "bench", *arguments]
    env = os.environ | {"CARASERVE_TEST_MARK": mark}
    document = last_line(subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env))
    run = document["runs"][0]
    assert (run["sent"], run["failed"]) == (12, 0)
    assert run["attainment"]["share"] == 1.0
    assert {group["rank"] for group in run["ranks"]} <= {4, 8, 16, 32, 64}
    assert alive(mark) == []


@contextmanager
def interrupted(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str, dict[str, Any]]]:
    """Yields a benchmark, the mark of its processes, and an empty report. Then interrupts it as a terminal does, fills
    the report, and checks that no process is left."""
    mark, report = uuid.uuid4().hex, dict[str, Any]()
    command = [sys.executable, "-m", "caraserve", "bench", *arguments]
    env, pipe = os.environ | {"CARASERVE_TEST_MARK": mark}, subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=env) as process:
        try:
            yield process, mark, report
            os.killpg(process.pid, signal.SIGINT)
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    report |= json.loads(printed.splitlines()[-1])
    assert "Traceback" not in errors
    assert alive(mark) == []


def test_an_interrupted_benchmark_reports_its_runs_and_leaves_no_process() -> None:
    load = ("--random-model", "10M", "--adapters", "2", "--request-rate", "20", "--num-prompts", "400")
    with interrupted("modes", *BUSY, "--modes", "cached,ondemand", "--repeats", "2", *load) as (process, _, report):
        assert process.stderr is not None
        while "sending" not in process.stderr.readline():
            assert process.poll() is None
    assert [run["interrupted"] for run in report["runs"]] == [True]


def test_a_benchmark_interrupted_before_its_server_is_ready_ends_at_once() -> None:
    with interrupted("serve", "--random-model", "100M", "--adapters", "1") as (process, mark, report):
        while len(alive(mark)) < 2:  # the server has been started
            assert process.poll() is None
    assert report["runs"] == []


def test_modes_are_compared_with_cached(tmp_path: Path) -> None:
    modes = ("--modes", "cached,pipelined", "--repeats", "1", "--resident", "1", "--emulate-link-mb-per-s", "50")
    load = ("--random-model", "10M", "--adapters", "4", "--ranks", "4,8", *QUICK)
    done = bench(
        "modes", *modes, *BUSY, *load, "--save", str(tmp_path), "--", "--profile", str(PROFILE), "--cpu-threads", "1"
    )
    document = last_line(done)
    assert [run["label"] for run in document["runs"]] == ["cached", "pipelined"]
    assert all(run["failed"] == 0 for run in document["runs"])
    assert "50 MB/s" in done.stderr
    assert "2 modes, 1 repeat: 2 runs of " in done.stderr
    assert "pipelined: sending 12 requests; run 2 of 2 in repeat 1 of 1, about " in done.stderr
    again = bench("compare", str(tmp_path / "modes.json"), str(tmp_path / "modes.json"))
    assert again.returncode == 0, again.stderr
    assert "1.000" in again.stdout


def test_each_run_has_new_prompts_that_miss_the_prefix_cache(url: str) -> None:
    load = ("--num-prompts", "5", "--random-output-len", "2", "--request-rate", "200", "200")
    before = len(requests_of(url))
    document = last_line(bench("serve", "--url", url, *load, "--random-input-len", "40"))
    assert len(document["runs"]) == 2, "one at each rate"
    prompts = [tuple(request["prompt"]) for request in requests_of(url)[before:] if len(request["prompt"]) == 40]
    assert len(prompts) == len({prompt[:16] for prompt in prompts}) == 10


def test_finished_runs_are_reported_when_the_endpoint_dies() -> None:
    rates = ("--request-rate", "50", "20", "--num-prompts", "24", "--random-output-len", "2")
    with fake_process("ttft-5-tpot-1") as (url, endpoint):
        command = [sys.executable, "-m", "caraserve", "bench", "serve", "--url", url, *rates]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as measuring:
            assert measuring.stderr is not None
            while "@ 20/s: sending" not in measuring.stderr.readline():
                assert measuring.poll() is None
            endpoint.kill()
            printed, errors = measuring.communicate(timeout=60)
    document = json.loads(printed.splitlines()[-1])
    assert document["runs"][0]["completed"] == 24
    assert "Traceback" not in errors


def test_a_run_in_which_every_request_is_refused_fails(url: str) -> None:
    done = bench("serve", "--url", url, "--lora-modules", "refuse", *QUICK)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["valid"] is False


def test_a_closed_loop_reports_the_share_of_requests_that_waited(url: str) -> None:
    document = last_line(bench("serve", "--url", url, *QUICK, "--max-concurrency", "1"))
    run = document["runs"][0]
    assert run["lateness"] is None
    assert run["held"]["concurrency"] == 1
    assert run["held"]["share_of_requests"] > 0
    assert run["offered_per_s"] == pytest.approx(100, rel=0.8)


def test_presets_show_the_assumptions_where_a_paper_is_incomplete() -> None:
    assert "toppings-s1" in bench("presets").stdout
    assert "no duration" in bench("presets", "toppings-s1").stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("serve", "--url", "http://127.0.0.1:1"), "127.0.0.1:1"),
        (("serve", "--preset", "toppings-s9"), "toppings-s9"),
        (("serve", "--url", "URL", "--lora-assignment", "zipf"), "zipf"),
        (("serve", "--slo", "speed:9"), "speed:9"),
        (("serve", "--url", "URL", "--trace", "azure-llm:nowhere.csv"), "nowhere.csv"),
        (("serve", "--", "--loading-mode", "magic"), "magic"),
        (("modes", "--modes", "ondemand"), "cached"),
        (("compare", "nowhere.json", "nowhere.json"), "nowhere.json"),
        (("serve", "--save", "/proc/nowhere"), "/proc/nowhere"),
        (("serve", "--url", "http://[::1"), "--url"),
        (("serve", "--url", "http://127.0.0.1:1", "--", "model"), "arguments after --"),
        (("modes", "--emulate-link-mb-per-s", "0"), "--emulate-link-mb-per-s"),
        (("modes", "--repeats", "0"), "--repeats"),
        (("modes", "--request-rate", "1", "2"), "one rate"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_invalid_arguments_are_refused_with_the_reason(arguments: tuple[str, ...], complaint: str, url: str) -> None:
    done = bench(*(url if word == "URL" else word for word in arguments))
    assert done.returncode in (1, 2)
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
