"""Command-line options that benchmarks share: those of the load and those of the report."""

import argparse
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from caraserve.bench.report.summary import LATENCIES
from caraserve.bench.synthetic import MODULES, SHAPES
from caraserve.bench.workload.arrivals import FORMS as ARRIVALS
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import Scale, WorkloadSpec, server_share, spec_from_preset
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import FORMS as POPULARITIES
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.bench.workload.presets import find_preset
from caraserve.bench.workload.traces import RateTrace, Trace, parse_trace
from caraserve.errors import ConfigError

TARGETS = {"qkv": MODULES[:3], "all": MODULES}
_LENGTHS, _RATE, _REQUESTS, _ADAPTERS, _RANKS = "fixed:128/32", 2.0, 50, 8, (8, 16, 32, 64)  # half a minute
_LEAST_SCALED_REQUESTS = 100  # with fewer there is no 99th percentile
_MOST_SCALED_ADAPTERS = 512  # more would only be more files
_VLLM_METRIC = {"e2el": "e2e"}
_VLLM_ASSIGNMENT = {"random": "uniform"}  # vLLM's names → ours


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of the load; None means the preset's value, or the default."""

    preset: str | None
    trace: str | None
    lengths: str | None
    random_input_len: int | None
    random_output_len: int | None
    arrivals: str | None
    burstiness: float | None
    request_rate: Sequence[float] | None
    rate_scale: float | None  # None: 1; NaN: by this machine's capacity
    scale: float
    num_prompts: int | None
    duration_s: float | None
    lora_assignment: str | None
    adapters: int | None
    ranks: tuple[int, ...] | None
    max_concurrency: int | None
    max_model_len: int | None
    ignore_eos: bool
    seed: int

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("load").add_argument
        add("--preset", metavar="NAME", help="a paper's setting; `caraserve bench presets` lists them")
        add("--trace", metavar="KIND:FILE", help="replay a trace's lengths, arrivals, adapters")
        add("--lengths", metavar="NAME", help=f"of prompts and answers (default {_LENGTHS})")
        add("--random-input-len", type=count, metavar="N", help="prompt tokens, all alike")
        add("--random-output-len", type=count, metavar="N", help="output tokens, all alike")
        add("--arrivals", metavar="NAME", help=f"{', '.join(_shown(ARRIVALS))} (default poisson)")
        add("--burstiness", type=positive, metavar="X", help="gamma arrivals; 1 is poisson")
        rates = f"requests a second, `inf` for all at once; several are run one after another (default {_RATE:g})"
        add("--request-rate", type=_rate, nargs="+", metavar="RPS", help=rates)
        auto = "times the rate; `auto`: at the share of this machine's capacity that the paper's machine ran at"
        add("--rate-scale", type=_rate_scale, metavar="X", help=auto)
        add("--scale", type=_share, default=1.0, metavar="X", help="shrinks a preset's model and run")
        add("--num-prompts", type=count, metavar="N", help=f"requests (default {_REQUESTS})")
        add("--duration-s", type=positive, metavar="S", help="of sending, instead of --num-prompts")
        popularities = f"which adapter each request uses: {', '.join(_shown(POPULARITIES))} (default uniform)"
        add("--lora-assignment", metavar="NAME", help=popularities)
        add("--adapters", type=count, metavar="N", help=f"used (default all, or {_ADAPTERS} random ones)")
        add("--ranks", type=_ranks, metavar="LIST", help="of random adapters in turn, as 8,16,32,64")
        add("--max-concurrency", type=count, metavar="N", help="closed loop: so many under way at most")
        add("--max-model-len", type=count, metavar="TOKENS", help="longer requests are cut to it")
        as_asked = "answers of exactly the length asked for, so that runs compare"
        add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=as_asked)
        add("--seed", type=int, default=0, help="of the load and its prompts")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Returns the options that a parser has found. Raises ConfigError for options that contradict each other."""
        return cls(**{name: getattr(args, name) for name in cls.__slots__})

    def __post_init__(self) -> None:
        pairs = (
            ("--rate-scale auto", self.auto_rate, "--request-rate", self.request_rate),
            ("--burstiness", self.burstiness, "--arrivals", self.arrivals),
            ("--num-prompts", self.num_prompts, "--duration-s", self.duration_s),
            ("--lengths", self.lengths, "--random-input-len", self.random_input_len),
            ("--lengths", self.lengths, "--random-output-len", self.random_output_len),
        )
        for one, one_value, other, other_value in pairs:
            if one_value and other_value is not None:
                raise ConfigError(f"{one} and {other} say different things of the load; give one of them")
        if self.preset is not None and (self.random_input_len is None) != (self.random_output_len is None):
            raise ConfigError("--preset has lengths of its own; give both --random-input-len and --random-output-len")

    @property
    def auto_rate(self) -> bool:
        """True if the rate is a share of this machine's capacity."""
        return self.rate_scale is not None and math.isnan(self.rate_scale)

    @property
    def concurrency(self) -> int | None:
        """The most requests in flight: --max-concurrency, or the preset's number of clients; None: open loop."""
        if self.max_concurrency is not None or self.preset is None:
            return self.max_concurrency
        return find_preset(self.preset).concurrency

    def spec(self) -> WorkloadSpec:
        """Returns the workload's specification. Raises ConfigError.

        Its rate is the first of --request-rate, or else the preset's or the default.
        """
        trace = parse_trace(self.trace) if self.trace is not None else None
        if self.preset is not None:
            spec = spec_from_preset(find_preset(self.preset), trace=trace, seed=self.seed, adapters=self.adapters)
        else:
            spec = _plain_spec(trace, self.adapters or _ADAPTERS, self.seed)
        spec = self._changed(spec, trace)
        if spec.rate is None and spec.arrivals.natural_rate is None:
            spec = replace(spec, rate=_RATE)
        rate = 1.0 if self.rate_scale is None or self.auto_rate else self.rate_scale
        fewer = min(1.0, _MOST_SCALED_ADAPTERS / max(1, spec.adapters)) if self.scale < 1.0 else 1.0
        return replace(spec, scale=Scale(rate=rate, adapters=fewer))

    def _changed(self, spec: WorkloadSpec, trace: Trace | None) -> WorkloadSpec:
        """Replaces the preset's values by the given options."""
        lengths = self.lengths
        if self.random_input_len is not None or self.random_output_len is not None:
            prompt, output = _LENGTHS.removeprefix("fixed:").split("/")
            lengths = f"fixed:{self.random_input_len or prompt}/{self.random_output_len or output}"
        if lengths is not None:
            spec = replace(spec, lengths=parse_lengths(lengths, trace))
        arrivals = self.arrivals if self.burstiness is None else f"gamma:{self.burstiness:g}"
        if arrivals is not None:
            spec = replace(spec, arrivals=parse_arrivals(arrivals, trace))
        if self.lora_assignment is not None:
            asked = _VLLM_ASSIGNMENT.get(self.lora_assignment, self.lora_assignment)
            spec = replace(spec, popularity=parse_popularity(asked, trace))
        if self.request_rate is not None:
            spec = with_rate(spec, self.request_rate[0])
        if self.num_prompts is not None:
            spec = replace(spec, num_requests=self.num_prompts, duration_s=None)
        elif self.duration_s is not None:
            spec = replace(spec, num_requests=None, duration_s=self.duration_s)
        if self.ranks is not None:
            spec = replace(spec, ranks=self.ranks)
        return replace(spec, max_context=self.max_model_len)

    def sized(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Returns `spec` with a length scaled by --scale, but for at least 100 requests. The rate must be known."""
        if self.scale == 1.0 or self.num_prompts is not None or self.duration_s is not None:
            return spec
        count = spec.num_requests or (spec.duration_s or 0.0) * spec.arrivals.rate(spec.rate) * spec.scale.rate
        share = min(1.0, max(self.scale, _LEAST_SCALED_REQUESTS / count))
        return replace(spec, scale=replace(spec.scale, requests=share))

    def model(self, asked: str | None) -> tuple[str, str | None]:
        """Returns the name of the random model to serve, and a note if it is smaller than the preset's."""
        if asked is not None:
            return asked, None
        wanted = find_preset(self.preset).base_model.default if self.preset is not None else "100M"
        wanted = {"llama-7b": "llama2-7b", "llama-13b": "llama2-13b"}.get(wanted, wanted)
        if wanted not in SHAPES:
            raise ConfigError(f"preset {self.preset} wants {wanted}, which is no shape of ours; give --random-model")
        if self.scale == 1.0:
            return wanted, None
        most = self.scale * SHAPES[wanted].parameters
        smaller = [name for name, shape in SHAPES.items() if shape.parameters <= most]
        chosen = max(smaller or ["10M"], key=lambda name: SHAPES[name].parameters)
        return chosen, f"The model is {chosen} in place of {wanted}."


def with_rate(spec: WorkloadSpec, rate: float) -> WorkloadSpec:
    """Returns the load at another rate; at an infinite rate all requests arrive at once."""
    if math.isinf(rate):
        return replace(spec, arrivals=parse_arrivals("burst"), rate=None)
    return replace(spec, rate=rate)


def _plain_spec(trace: Trace | None, adapters: int, seed: int) -> WorkloadSpec:
    """Returns the load without a preset: lengths, arrivals and adapters of the trace if it has them, else defaults."""
    if isinstance(trace, RateTrace):
        trace = server_share(trace, adapters, seed)
    from_trace = trace is not None
    has_adapters = isinstance(trace, RateTrace) or (trace is not None and trace.adapters is not None)
    return WorkloadSpec(
        lengths=parse_lengths("trace" if from_trace and hasattr(trace, "prompt_tokens") else _LENGTHS, trace),
        arrivals=parse_arrivals("trace" if from_trace and getattr(trace, "at_s", 0) is not None else "poisson", trace),
        rate=None if from_trace else _RATE,
        popularity=parse_popularity("trace" if has_adapters else "uniform", trace),
        adapters=adapters,
        ranks=_RANKS,
        num_requests=_REQUESTS,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of the report."""

    slo: str | None
    slo_scale: float | None
    percentiles: tuple[float, ...]
    percentile_metrics: tuple[str, ...]
    save: Path | None
    json: bool  # also on a terminal

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("report")
        add = group.add_argument
        add("--slo", metavar="LIMITS", help="latency limits in ms, as ttft:200,tpot:30")
        add("--slo-scale", type=positive, metavar="X", help="limit TPT to X times that of a run without adapters")
        usual, every = (50.0, 90.0, 95.0, 99.0), "percentiles of every latency (default 50,90,95,99)"
        add("--metric-percentiles", dest="percentiles", type=_percentiles, default=usual, metavar="LIST", help=every)
        known = names_among(LATENCIES, "latency", _VLLM_METRIC)
        shown = f"latencies on the terminal (default {','.join(LATENCIES)}); a saved report has all"
        add("--percentile-metrics", type=known, default=LATENCIES, metavar="LIST", help=shown)
        add("--save", type=Path, metavar="DIR", help="folder for JSON, CSV and figures")
        add_json(group)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        if args.slo is not None and args.slo_scale is not None:
            raise ConfigError("--slo and --slo-scale both set the limits; give one of them")
        return cls(**{name: getattr(args, name) for name in cls.__slots__})


def add_json(parser: Any) -> None:
    """Adds `--json` to a parser or to a group of one."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON also on a terminal")


def _shown(forms: object) -> list[str]:
    assert isinstance(forms, dict)
    return [form.shown(name).replace("%", "%%") for name, form in forms.items()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _bounded(good: Callable[[float], bool], complaint: str) -> Callable[[str], float]:
    """Returns a function that reads a number and refuses one that is not good with the complaint."""

    def parse(text: str) -> float:
        value = _number(text)
        if not good(value):
            raise argparse.ArgumentTypeError(f"{text} {complaint}")
        return value

    return parse


positive = _bounded(lambda value: 0 < value < math.inf, "is not above 0")
_share = _bounded(lambda value: 0 < value <= 1, "is not above 0 and at most 1")
_rate = _bounded(lambda value: value > 0, "is no rate; write one above 0, or inf")


def _rate_scale(text: str) -> float:
    return math.nan if text == "auto" else positive(text)


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(count(part.strip()) for part in text.split(","))


def names_among(
    known: Collection[str], what: str, aliases: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], tuple[str, ...]]:
    """Returns a function that reads a list such as `a,b` of known names; `aliases` are other names of some."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(aliases.get(part.strip(), part.strip()) for part in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is no {what}; there are {', '.join(known)}")
        return tuple(dict.fromkeys(names))

    return parse


def _percentiles(text: str) -> tuple[float, ...]:
    values = tuple(_number(part) for part in text.split(","))
    if any(not 0 < value < 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: percentiles lie between 0 and 100")
    return values
