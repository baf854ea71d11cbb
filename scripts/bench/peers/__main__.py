"""Compares `caraserve serve` with llama.cpp's server and vLLM for CPUs, over HTTP, on one machine in one run.

    .venv/bin/python -m scripts.bench.peers --save scripts/bench/results/peers/cpu.json

Servers of one format run beside each other, with two threads each; all but the one that is measured are stopped
(SIGSTOP). They get the same requests in turns, in random order within a round: one request after another (128 and 64
tokens), a prompt of 2,048 tokens, 16 requests at once, and those on 16 adapters. The model has random weights:
100 million parameters, as a Hugging Face folder and as GGUF in each format; or it is one of yours (--model, --gguf).
The programs are found or built below the cache folder. After each round the document is written; the same command
again goes on where an interrupted one has ended.
"""

import argparse
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from caraserve.bench.records import machine, versions
from caraserve.bench.report.plots import can_draw
from caraserve.bench.report.tables import open_console, to_rich
from caraserve.errors import BackendFailed, CaraServeError, ConfigError
from scripts.bench.peers.builds import LlamaCpp, Vllm, find_llama, find_vllm
from scripts.bench.peers.models import FORMATS, ModelFiles, synthetic
from scripts.bench.peers.rounds import LOADS, Load, first_tokens, run_round, warm_up
from scripts.bench.peers.servers import (
    LLAMA,
    VLLM,
    RunningServer,
    ServerCommand,
    llama_command,
    our_command,
    started,
    vllm_commands,
)
from scripts.bench.peers.summary import draw, missing_rounds, table

_CACHE = Path.home() / ".cache" / "caraserve-peers"
_THREADS = min(2, len(os.sched_getaffinity(0)))
_ADAPTERS = 16


def main() -> None:
    """Measures what the document does not have yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument(
        "--loads", nargs="+", choices=[load.name for load in LOADS], help="default: all", metavar="LOAD"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="compare on this model instead")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the same model as a folder, or another model's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=_THREADS, help="of each server")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="of adapters, in turn")
    parser.add_argument(
        "--also",
        nargs=2,
        action="append",
        default=[],
        metavar=("FORMAT", "ARGUMENTS"),
        help="measure another server of ours with these arguments, as --also q4_0 '--option value'; may be repeated",
    )
    parser.add_argument("--peers", nargs="*", choices=(LLAMA, VLLM), default=[LLAMA, VLLM])
    parser.add_argument("--llama", type=Path, metavar="DIR", help="folder with llama-server and llama-quantize")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="virtual environment with vLLM")
    parser.add_argument("--cache", type=Path, default=_CACHE, metavar="DIR")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the document (default: in the cache folder)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figure too; needs the `plot` extra")
    args = parser.parse_args()
    if args.plot is not None and not can_draw():
        parser.error("--plot needs matplotlib: install the package's `plot` extra")
    try:
        document = uvloop.run(_measure(args))
    except CaraServeError as error:
        raise SystemExit(f"error: {error}") from None
    open_console().print(to_rich(table(document)))
    if args.plot is not None:
        args.plot.write_bytes(draw(document))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    console = Console(stderr=True, markup=False, highlight=False)
    path = args.save or args.cache / "peers.json"
    llama = find_llama(args.llama, args.cache, console) if LLAMA in args.peers else None
    vllm = find_vllm(args.vllm, args.cache, console) if VLLM in args.peers else None
    document = _continued(path, _document(args, llama, vllm))
    loads = [load for load in LOADS if not args.loads or load.name in args.loads]
    own = args.gguf.stem if args.gguf else args.model.name if args.model else None
    for form in [own] if own else args.formats:
        measured = document["formats"].setdefault(form, {"servers": {}, "unavailable": {}, "rounds": []})
        if not missing_rounds(measured, args.rounds):
            continue
        if own:
            model = ModelFiles(args.model, args.gguf, "auto")
        else:
            model = synthetic(args.cache / "models", form, args.ranks, _ADAPTERS, llama.quantize if llama else None)
        also = [shlex.split(text) for name, text in args.also if name == form]
        commands = _commands(model, args.threads, also, llama, vllm)
        try:
            await _measure_format(form, measured, commands, loads, args, console, lambda: _write(path, document))
        except BackendFailed as error:  # the other formats can still be measured
            console.print(f"{form}: {error}")
    return document


def _document(args: argparse.Namespace, llama: LlamaCpp | None, vllm: Vllm | None) -> dict[str, Any]:
    kept = ("threads", "ranks", "also", "peers", "loads", "gguf", "model")
    return {
        "bench": "peers",
        "machine": machine(),
        "versions": versions(),
        "peers": {LLAMA: llama.version if llama else None, VLLM: vllm.version if vllm else None},
        "arguments": {name: getattr(args, name) for name in kept},
        "formats": {},
    }


def _without_folders(text: str) -> str:
    """Returns a text without the paths of this machine's home and of the current folder."""
    return text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")


def _continued(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Returns the document at `path` if it is of the same settings and programs, otherwise the fresh one. Raises
    ConfigError for a document of others."""
    if not path.exists():
        return fresh
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name in ("arguments", "versions", "peers"):
        if found[name] != json.loads(json.dumps(fresh[name], default=str)):
            raise ConfigError(f"{path} has figures of other {name}: delete it, or name another file with --save")
    return found


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    unfinished.rename(path)


def _commands(
    model: ModelFiles, threads: int, also: Sequence[Sequence[str]], llama: LlamaCpp | None, vllm: Vllm | None
) -> list[ServerCommand]:
    ours = [our_command(model, threads, extra) for extra in ((), *also)]
    theirs = [llama_command(model, threads, llama) if llama else None]
    theirs += vllm_commands(model, threads, vllm) if vllm else ()
    return [command for command in (*ours, *theirs) if command is not None]


async def _measure_format(
    form: str,
    measured: dict[str, Any],
    commands: Sequence[ServerCommand],
    loads: Sequence[Load],
    args: argparse.Namespace,
    console: Console,
    write: Callable[[], None],
) -> None:
    """Starts the servers of one format and adds the missing rounds to what was measured.

    A server that does not start is noted and left out.
    """
    measured["unavailable"] = {}
    async with AsyncExitStack() as stack:
        servers: list[RunningServer] = []
        wanted = [one for one in commands if any(one.takes_part(load.adapters) for load in loads)]
        for command in wanted:
            console.print(f"{form}: starting {command.title}")
            try:
                servers.append(await stack.enter_async_context(started(command, args.cache / "logs" / form)))
            except BackendFailed as error:
                console.print(str(error))
                measured["unavailable"][command.title] = str(error).splitlines()[-1]
        for server in servers:
            command = server.command
            measured["servers"][command.title] = {
                "command": _without_folders(shlex.join(command.arguments)),
                "environment": dict(command.environment),
                "first_tokens": {
                    "adapter" if adapter else "base": await first_tokens(server, adapter)
                    for adapter in (False, True)
                    if command.takes_part(adapter)
                },
            }
        await warm_up(servers, loads, console.print)
        for number in missing_rounds(measured, args.rounds):
            console.rule(f"{form}: round {number + 1} of {args.rounds}")
            measured["rounds"].append(await run_round(servers, loads, number, console.print))
            write()


if __name__ == "__main__":
    main()
