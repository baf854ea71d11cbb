"""The README's commands and code are real: they parse, name files that exist, and use options that the server has."""

import argparse
import ast
import json
import os
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from caraserve import demo
from caraserve.config import EngineConfig, HttpConfig, LoraConfig, ModelConfig

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = {demo.BASE_NAME, *demo.ADAPTER_NAMES}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The argument lists of every command in a bash block that runs `program`."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [parts[1:] for parts in words if parts and parts[0] == program]


def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for config in (ModelConfig, LoraConfig, EngineConfig, HttpConfig):
        config.add_arguments(parser)
    return parser


def test_the_two_commands_stand_at_the_top() -> None:
    first = blocks("bash")[0]
    assert [line.split()[0] for line in first.splitlines()] == ["scripts/serve", "scripts/test"]


def test_every_command_is_one_of_ours_or_curl() -> None:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines() if line]
    assert {line.split()[0] for line in lines} == {"scripts/serve", "scripts/test", "curl"}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b(?:scripts|caraserve|tests)/[\w./]+\w", TEXT))))
def test_files_named_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("script", ["scripts/serve", "scripts/test", ".ci/run"])
def test_commands_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("arguments", commands("scripts/serve"), ids=shlex.join)
def test_serve_options_exist(arguments: list[str]) -> None:
    serve_parser().parse_args(arguments)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(--[\w-]+)`", TEXT))))
def test_options_named_in_the_text_exist(option: str) -> None:
    options = {name for action in serve_parser()._actions for name in action.option_strings}
    assert option in options


@pytest.mark.parametrize("arguments", commands("curl"), ids=shlex.join)
def test_requests_are_well_formed(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-H", dest="header")
    parser.add_argument("-d", dest="data")
    request = parser.parse_args(arguments)
    assert urlsplit(request.url).netloc == "127.0.0.1:8000"
    if request.data is not None:
        assert request.header == "Content-Type: application/json"
        assert json.loads(request.data)["model"] in MODELS


@pytest.mark.parametrize("code", blocks("python"))
def test_code_compiles_and_names_models_that_exist(code: str) -> None:
    voices = next(node.iter for node in ast.walk(ast.parse(code)) if isinstance(node, ast.For))
    assert set(ast.literal_eval(voices)) == MODELS
