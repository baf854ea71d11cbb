"""`caraserve bench …`: parses the arguments of the benchmarks and runs one of them.

The benchmarks' modules are imported when one runs, so that parsing the command line stays fast.
"""

import argparse
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caraserve.bench.checkout import laboratory
from caraserve.bench.lora import PARTS
from caraserve.bench.options import TARGETS, LoadOptions, ReportOptions, add_json, count, names_among, positive
from caraserve.bench.synthetic import ITEMSIZE, SHAPES
from caraserve.config import LOADING_MODES, LORA_KERNELS, ROUTINGS
from caraserve.errors import ConfigError
from caraserve.util.option_values import parse_cpus


def run_benchmark(argv: Sequence[str]) -> int:
    """Runs `caraserve bench` with these arguments; those after `--` go to `caraserve serve`. Returns the exit code."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    ours, theirs = argv[:at], argv[at + 1 :]
    args = bench_parser().parse_args(ours)
    if theirs and not args.takes_serve_arguments:
        bench_parser().error(f"bench {ours[0]} takes nothing after --")
    args.serve_arguments = tuple(theirs)
    return int(args.run(args))


def bench_parser() -> argparse.ArgumentParser:
    """Returns the parser of `caraserve bench`, for arguments up to `--`."""
    bench = argparse.ArgumentParser(prog="caraserve bench", description="Measures a server, or this machine.")
    bench.set_defaults(takes_serve_arguments=False)
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="KIND")
    _add_serve(kinds)
    _add_modes(kinds)
    _add_lora(kinds)
    _add_cluster(kinds)
    _add_compare(kinds)
    _add_presets(kinds)
    _add_paper(kinds)
    return bench


def _add_serve(kinds: Any) -> None:
    serve = kinds.add_parser(
        "serve",
        help="send a load to an endpoint",
        description="Sends a load to any OpenAI-compatible endpoint, or to a server that it starts and ends itself: "
        "the bundled demo, a random model, or whatever `caraserve serve` takes after `--`.",
        usage="caraserve bench serve [OPTIONS] [-- MODEL SERVE-OPTIONS]",
    )
    group = serve.add_argument_group("endpoint")
    group.add_argument("--url", metavar="URL", help="as http://host:port; without it a server is started")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--backend", choices=("openai", "openai-chat", "llamacpp"), default="openai", help="what the endpoint speaks"
    )
    group.add_argument("--lora-modules", nargs="+", metavar="NAME", help="adapters to use (default: all it lists)")
    _add_random_model(group)
    LoadOptions.add_arguments(serve)
    ReportOptions.add_arguments(serve)
    serve.add_argument("--label", metavar="TEXT", help="what the report calls the run (default: the model's name)")
    serve.set_defaults(run=_serve, takes_serve_arguments=True)


def _add_modes(kinds: Any) -> None:
    modes = kinds.add_parser(
        "modes",
        help="compare loading modes on this machine",
        description="Gives one load to several loading modes in turn, each in a server of its own with random weights, "
        "and reports every latency as a ratio to `cached`. Arguments after `--` go to every server.",
        usage="caraserve bench modes [OPTIONS] [-- SERVE-OPTIONS]",
    )
    group = modes.add_argument_group("modes")
    add = group.add_argument
    known = names_among(LOADING_MODES, "loading mode")
    add("--modes", type=known, default=tuple(LOADING_MODES), metavar="LIST", help=",".join(LOADING_MODES))
    known = names_among(LORA_KERNELS, "LoRA kernel")
    each = f"every mode with each of {','.join(LORA_KERNELS)} in turn (default: the server's)"
    add("--lora-kernel", dest="lora_kernels", type=known, default=(), metavar="LIST", help=each)
    add("--repeats", type=count, default=3, help="of every mode")
    add("--resident", type=count, metavar="N", help="adapters on the device at once (default a quarter)")
    add("--emulate-link-mb-per-s", type=positive, metavar="MB", help="bandwidth to the device")
    busy = "emulate a link that loads for all requests would keep busy for this share of the time"
    add("--load-share", type=positive, metavar="X", help=busy)
    add("--prompt-embeds", action="store_true", help="prompts are random vectors in place of tokens")
    calm = "cores that other programs may use; a run that they disturbed more is made again, twice at most"
    add("--calm-cores", type=positive, default=max(0.2, 0.1 * (os.cpu_count() or 1)), metavar="X", help=calm)
    used = "choose the rate so that `cached` keeps X cores busy (default: by this machine's capacity)"
    add("--cores-used", type=positive, metavar="X", help=used)
    _add_random_model(group)
    LoadOptions.add_arguments(modes)
    ReportOptions.add_arguments(modes)
    modes.set_defaults(run=_bench_modes, takes_serve_arguments=True)


def _add_random_model(group: Any) -> None:
    group.add_argument("--random-model", choices=tuple(SHAPES), help="serve random weights of this shape")
    group.add_argument("--targets", choices=tuple(TARGETS), default="qkv", help="modules of random adapters")
    group.add_argument("--dtype", choices=tuple(ITEMSIZE), default="bfloat16", help="of random weights")


def _add_compare(kinds: Any) -> None:
    compare = kinds.add_parser("compare", help="set two saved reports side by side")
    compare.add_argument("a", type=Path, metavar="A.json")
    compare.add_argument("b", type=Path, metavar="B.json")
    compare.add_argument("--save", type=Path, metavar="DIR", help="folder for a figure of the ratios")
    compare.set_defaults(run=_compare)


def _add_presets(kinds: Any) -> None:
    presets = kinds.add_parser("presets", help="list the papers' settings")
    presets.add_argument("name", nargs="?", help="one of them, with what its paper leaves unsaid")
    presets.set_defaults(run=_presets)


def _add_paper(kinds: Any) -> None:
    paper = kinds.add_parser(
        "paper",
        help="run a figure of a paper and print its values next to ours",
        description="Runs a figure of Toppings, CaraServe or LoRAServe at a scale for this machine, prints the paper's "
        "values next to ours, and writes JSON and a plot.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    paper.add_argument("paper", choices=("toppings", "caraserve", "loraserve"))
    paper.add_argument("--figure", required=True, metavar="N,…", help="as in the paper, or `all`")
    paper.add_argument("--duration-s", type=positive, default=300.0, metavar="S", help="of each run")
    paper.add_argument("--repeats", type=count, default=3, help="of each run on a server")
    paper.add_argument("--seed", type=int, default=0)
    paper.add_argument("--save", type=Path, default=Path("papers"), metavar="DIR", help="folder for JSON and plots")
    add_json(paper)
    paper.set_defaults(run=_paper)


def _paper(args: argparse.Namespace) -> int:
    command = laboratory("papers.command", f"paper {args.paper} --figure {args.figure}")
    options = command.PaperOptions(args.duration_s, args.repeats, args.seed)
    return int(command.bench_paper(args.paper, args.figure, options, args.save, args.json))


def _add_lora(kinds: Any) -> None:
    lora = kinds.add_parser(
        "lora",
        help="what LoRA costs on this machine",
        description="Measures the CPU LoRA kernels beside torch and NumPy on one core, hand-offs to CPU LoRA workers "
        "beside a UNIX socket, the workers beside torch's threads, and a GPU's decode kernels beside torch.bmm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    lora.add_argument("--parts", nargs="+", choices=PARTS, help="what to measure (all that this machine has)")
    lora.add_argument(
        "--lora-cpus", type=parse_cpus, metavar="LIST", help="cores to measure on, as 1-3,6 (default: all)"
    )
    lora.add_argument("--quick", action="store_true", help="fewer points and repeats")
    _add_save(lora)
    lora.set_defaults(run=_lora)


def _add_cluster(kinds: Any) -> None:
    cluster = kinds.add_parser(
        "cluster",
        help="simulate a fleet under routing policies",
        description="Simulates a fleet with the functions that route and place in a real one, under a virtual clock. "
        "Without --preset or --trace it is Toppings' simulation: 60 instances, 40,000 adapters, 340 requests/s.",
    )
    add = cluster.add_argument_group("fleet").add_argument
    known = names_among(ROUTINGS, "routing policy")
    add("--routing", type=known, default=ROUTINGS, metavar="LIST", help=",".join(ROUTINGS))
    sizes = "fleet sizes to simulate one after another (default: as many as the preset has)"
    add("--instances", type=count, nargs="+", default=(), metavar="N", help=sizes)
    kernel = (
        "how the ranks of a batch add up: in a sum, as in this server's kernels and S-LoRA's MBGMV; every request "
        "at the largest rank of its batch, as in Punica's BGMV, which only the simulator has; or as a profile was "
        "measured (default: measured with --profile, otherwise unpadded)"
    )
    add("--kernel", choices=("unpadded", "padded", "measured"), help=kernel)
    machines = "times of measured machines, not the papers'"
    add("--profile", type=Path, nargs="+", default=(), metavar="FILE", help=machines)
    add("--slo-scale", type=positive, default=1.5, metavar="X", help="TPT within X times the base's")
    who = (
        "who routes: the instances, by what gossip tells them, or one scheduler that knows every instance's state "
        "at once, with every adapter on every instance, as the papers assume (default %(default)s)"
    )
    add("--scheduler", choices=("gossip", "central"), default="gossip", help=who)
    add("--beat-ms", type=positive, metavar="MS", help="between an instance's load beats (default 250)")
    add("--routers", type=count, metavar="N", help="instances that clients send to (default: all)")
    copies = "of each adapter at the start, under routings that make no plan (default 2; all if central)"
    add("--copies", type=count, metavar="N", help=copies)
    between = "between placement plans (default %(default)s)"
    add("--plan-s", type=positive, default=60.0, metavar="S", help=between)
    points = "plan by the rate at which one instance's P95 TTFT breaks the SLO for each rank, not by the formula"
    add("--profiled-points", action="store_true", help=points)
    padded = "prompts cost what the largest rank of their iteration does, as in LoRAServe; here they do not"
    add("--padded-prompts", action="store_true", help=padded)
    add("--need-attainment", type=positive, metavar="X", help="find the least fleet with this share")
    add("--need-ttft-p95-ms", type=positive, metavar="MS", help="and with 95 %% of TTFTs under this")
    add("--processes", type=count, metavar="N", help="(default: one for each core)")
    LoadOptions.add_arguments(cluster)
    _add_save(cluster)
    cluster.set_defaults(run=_cluster)


def _cluster(args: argparse.Namespace) -> int:
    from caraserve.bench.simulator.command import ClusterOptions, bench_cluster

    options = ClusterOptions(**{name: getattr(args, name) for name in ClusterOptions.__slots__})
    return bench_cluster(options, LoadOptions.from_args(args), _arguments(args))


def _add_save(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--save", type=Path, metavar="DIR", help="folder for the report: JSON and figures")
    add_json(kind)


def _lora(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench lora compares with torch: install the package's `test` extra, or torch itself")
    from caraserve.bench.lora.run import FULL, QUICK, bench_lora

    bench_lora(args.parts, args.lora_cpus, QUICK if args.quick else FULL, args.save, args.json)
    return 0


def _serve(args: argparse.Namespace) -> int:
    from caraserve.bench.output import run_and_report
    from caraserve.bench.serve import BenchTarget, bench_serve

    load, report = LoadOptions.from_args(args), ReportOptions.from_args(args)
    values = {name: getattr(args, name) for name in BenchTarget.__slots__ if name != "serve"}
    target = BenchTarget(**values, serve=args.serve_arguments or None)
    return run_and_report("serve", lambda: bench_serve(target, load, report, args.label), report, _arguments(args))


def _bench_modes(args: argparse.Namespace) -> int:
    from caraserve.bench.modes import bench_modes, modes_options
    from caraserve.bench.output import run_and_report

    options, load, report = modes_options(args)
    return run_and_report("modes", lambda: bench_modes(options, load, report), report, _arguments(args))


def _arguments(args: argparse.Namespace) -> Mapping[str, object]:
    """Returns the arguments for the report: enough to repeat the run, without keys."""
    omitted = ("run", "api_key", "save", "json", "takes_serve_arguments")  # `save` is a folder of this machine
    arguments = {name: value for name, value in vars(args).items() if name not in omitted}
    if (url := arguments.get("url")) is not None:
        arguments["url"] = re.sub(r"//[^/]*@", "//", url)
    return arguments | {"serve_arguments": without_keys(args.serve_arguments)}


def without_keys(arguments: Sequence[str]) -> list[str]:
    """Returns a server's arguments with API keys replaced by `…`, for the report."""
    shown, in_keys = [], False
    for word in arguments:
        flag, equals, _ = word.partition("=")
        if word.startswith("--"):
            in_keys = flag in ("--api-key", "--admin-key")
            shown.append(f"{flag}=…" if in_keys and equals else word)
        else:
            shown.append("…" if in_keys else word)
    return shown


def _compare(args: argparse.Namespace) -> int:
    from caraserve.bench.output import show_comparison

    return show_comparison(args.a, args.b, args.save)


def _presets(args: argparse.Namespace) -> int:
    from caraserve.bench.output import show_presets

    return show_presets(args.name)
