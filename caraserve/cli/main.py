"""The `caraserve` command: parses arguments into frozen configs and runs one subcommand.

Exit codes: 0 success, 1 the work failed, 2 the command line is wrong, 130 interrupted.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from caraserve import __version__
from caraserve.cli.interrupts import EXIT_CODE, ending_at_once
from caraserve.cli.options import OptionParser
from caraserve.config import SERVE_CONFIGS, EngineConfig, LoraConfig, ModelConfig
from caraserve.errors import CaraServeError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["bench"]:
            from caraserve.bench.cli import run_benchmark  # here, since its imports slow down the other commands

            return run_benchmark(words[1:])
        if words[:1] == ["chat"]:
            return _chat(words[1:])
        if words[:1] == ["adapter"]:
            return _adapter(words[1:])
        parser = _parser()
        if not words:
            parser.print_help()
            return 0
        args = parser.parse_args(words)
        return int(args.run(args))
    except KeyboardInterrupt:
        print("caraserve: interrupted", file=sys.stderr)
        return EXIT_CODE
    except ConfigError as error:
        print(f"caraserve: {error.message}", file=sys.stderr)
        return 2
    except CaraServeError as error:
        print(f"caraserve: {error.message}", file=sys.stderr)
        return 1


class _CommandParser(argparse.ArgumentParser):
    """The parser of the subcommand's name. Raises ConfigError with one line for a mistake."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument COMMAND: ')}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _CommandParser(prog="caraserve", description="Many LoRA adapters over one base model.")
    parser.add_argument("--version", action="version", version=f"caraserve {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=OptionParser, prog="caraserve"
    )
    serve = commands.add_parser(
        "serve",
        configs=SERVE_CONFIGS,
        help="serve a model and its adapters over HTTP",
        usage="caraserve serve [MODEL] [OPTIONS]",
        description="Serves a base model and LoRA adapters behind one OpenAI-compatible endpoint.",
    )
    serve.set_defaults(run=_serve)
    _add_profile(
        commands.add_parser(
            "profile",
            configs=(ModelConfig, LoraConfig, EngineConfig),
            help="measure this machine with a model",
            usage="caraserve profile [MODEL] [OPTIONS]",
            description="Measures the times of loading, prefill, decode and CPU LoRA, and writes them to a file. "
            "Takes serve's options, so that it measures what will be served.",
        )
    )
    doctor = commands.add_parser(
        "doctor",
        configs=SERVE_CONFIGS,
        help="check this machine, and what would be served",
        usage="caraserve doctor [MODEL] [OPTIONS]",
        description="Says what this machine has for serving and what to do about the rest, one line for each check. "
        "Takes serve's options, and checks what they name. Exit code 1: serve would fail.",
    )
    doctor.set_defaults(run=_doctor)
    # For --help only: `main` runs these, which take none of serve's options.
    commands.add_parser("bench", help="measure a server or this machine")
    commands.add_parser("chat", help="converse with an adapter of a running server, in the terminal")
    commands.add_parser("adapter", help="say what an adapter's folder holds, or convert it to PEFT's files")
    return parser


def _chat_parser() -> argparse.ArgumentParser:
    parser = _CommandParser(
        prog="caraserve chat",
        description="Converses with a model or an adapter of a running server. /help lists the commands inside.",
    )
    parser.add_argument("adapter", nargs="?", metavar="ADAPTER", help="who answers (default: the base model)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("CARASERVE_API_KEY"),
        metavar="KEY",
        help="the server's API key (default: CARASERVE_API_KEY of the environment)",
    )
    return parser


def adapter_parser() -> argparse.ArgumentParser:
    """Returns the parser of `caraserve adapter`."""
    parser = _CommandParser(prog="caraserve adapter", description="Reads adapters' folders as the server does.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="caraserve adapter")
    inspect = commands.add_parser(
        "inspect",
        help="say what a folder holds, and what of it would be served",
        description="Says what an adapter's folder holds and, with --model, what of it would be applied and what not. "
        "Exit code 1: it would be refused.",
    )
    inspect.add_argument("folder", type=Path, metavar="FOLDER", help="the adapter's folder")
    inspect.add_argument("--model", type=Path, metavar="DIR", help="folder of the base model")
    convert = commands.add_parser(
        "import",
        help="convert an adapter to PEFT's files",
        description="Writes an adapter of any program that the server reads as PEFT's files, with the values that are "
        "served.",
    )
    convert.add_argument("source", type=Path, metavar="SRC", help="the adapter's folder")
    convert.add_argument("target", type=Path, metavar="DST", help="a folder that does not exist yet")
    convert.add_argument("--model", type=Path, metavar="DIR", required=True, help="folder of the base model")
    return parser


def _add_profile(profile: argparse.ArgumentParser) -> None:
    group = profile.add_argument_group("profile")
    group.add_argument("--quick", action="store_true", help="measure fewer points: takes seconds instead of a minute")
    group.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file to write (default: in ~/.cache, named by machine and model)",
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw points and fits to FILE; needs the `plot` extra")
    profile.set_defaults(run=_profile)


def _serve(args: argparse.Namespace) -> int:
    from caraserve.telemetry import log

    model, lora, engine, http, cluster = args.configs
    log.configure(http.log_format, http.log_level)
    for note in args.notes:
        logging.getLogger("caraserve").info("%s", note)
    with ending_at_once() as release:
        import uvloop

        from caraserve.serve import serve

        uvloop.run(serve(model, lora, engine, http, cluster, watching_signals=release))
    return 0


def _profile(args: argparse.Namespace) -> int:
    from caraserve.telemetry import log

    log.configure("human", "info")
    with ending_at_once():
        from caraserve.cli.profile import profile

        profile(*args.configs, quick=args.quick, output=args.output, plot=args.plot)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from caraserve.cli.doctor import Configs, doctor

    return doctor(Configs(*args.configs))


def _chat(words: Sequence[str]) -> int:
    args = _chat_parser().parse_args(words)
    from caraserve.cli.chat import chat

    chat(args.url, args.api_key, args.adapter)
    return 0


def _adapter(words: Sequence[str]) -> int:
    args = adapter_parser().parse_args(words)
    from caraserve.cli import adapter

    if args.command == "import":
        lines = adapter.convert(args.source, args.target, args.model)
    else:
        lines = adapter.inspect(args.folder, args.model)
    for line in lines:
        print(line, flush=True)
    return 0
