"""Commands and code of the README, of docs/ and of the pages beside the README are real: they parse, and files and
options that they name exist. `test_docs.py` runs what can be run."""

import argparse
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from caraserve.bench.cli import bench_parser
from caraserve.bench.workload.presets import find_preset
from caraserve.cli.compat_flags import FLAGS, SAME
from caraserve.cli.main import adapter_parser
from caraserve.cli.options import OptionParser
from caraserve.config import SERVE_CONFIGS
from scripts.laboratory.gpu import stages

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").glob("*.md"))
BESIDE = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
TEXT = "\n".join([README, *(page.read_text(encoding="utf-8") for page in (*PAGES, *BESIDE))])


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Returns the argument lists of every command in a bash block that runs `program`."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [parts[1:] for parts in words if parts and parts[0] == program]


def bench_kinds() -> dict[str, argparse.ArgumentParser]:
    kinds = next(action for action in bench_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(kinds.choices)


def test_the_two_commands_are_at_the_top() -> None:
    first = blocks("bash")[0]
    assert first in README
    assert [line.split()[0] for line in first.splitlines()] == ["scripts/serve", "scripts/test"]


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?<!/opt/)(?<!cache/)\b(?:scripts|caraserve|tests)/[\w./-]+\w", TEXT)))
)
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("script", ["scripts/serve", "scripts/test", "scripts/gpu_check", ".ci/run"])
def test_commands_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("arguments", commands("scripts/serve"), ids=shlex.join)
def test_serve_options_exist(arguments: list[str]) -> None:
    OptionParser(SERVE_CONFIGS).parse_args(arguments)


@pytest.mark.parametrize("arguments", commands(".venv/bin/caraserve"), ids=shlex.join)
def test_commands_exist_with_their_options(arguments: list[str]) -> None:
    if arguments[0] == "adapter":
        adapter_parser().parse_args(arguments[1:])
        return
    assert arguments[0] == "bench"
    args = bench_parser().parse_args(arguments[1:])
    if getattr(args, "preset", None) is not None:
        assert find_preset(args.preset).name


@pytest.mark.parametrize("arguments", commands("scripts/gpu_check"), ids=shlex.join)
def test_gpu_check_takes_these_arguments(arguments: list[str]) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "gpu_check"))
    args = script["parser"]().parse_args(arguments)
    assert all(stages.parse_stages(names) for names in (args.only, args.skip) if names is not None)
    assert args.speed is None or stages.parse_speed(args.speed)


def test_the_table_of_stages_is_the_one_that_runs() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", page, flags=re.MULTILINE)
    assert listed == [(stage.name, str(stage.budget_s)) for stage in (*stages.STAGES, *stages.LOADS)]


def test_options_named_in_the_text_exist() -> None:
    parsers = [OptionParser(SERVE_CONFIGS), *bench_kinds().values()]
    ours = {name for parser in parsers for action in parser._actions for name in action.option_strings}
    foreign = {name for flag in FLAGS for name in flag.names}
    assert set(re.findall(r"`(--[\w-]+)`", TEXT)) - ours - foreign - SAME.keys() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?[a-z_/]+/(?:[a-z_]+\.py)?|[a-z_]+\.py)`", text)
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "caraserve" / name).exists()]
    assert missing == []
