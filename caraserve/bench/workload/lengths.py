"""Named distributions of prompt and output lengths, in tokens, and lengths read from files.

`distributions.json` has the measured distributions and their sources: quantiles of prompt lengths and of output
lengths, and the correlation of a Gaussian copula between the two. The other distributions are

`fixed:P/O`          P prompt tokens and O output tokens in every request
`uniform:L-H/L-H`    whole numbers from L to H - 1, as S-LoRA's generator draws them: uniform:8-512/8-512
`punica`             Punica's benchmark: log-normal prompts; the sum of prompt and output is uniform below 2048
`file:PATH`          random rows of a file, in any format of traces.py that has lengths
`trace`              the rows of the workload's trace, in order

`@P/O` or `@P/O/MOST` may follow each name: prompt lengths are multiplied by P and output lengths by O, and requests
with more than MOST tokens in total are shortened to MOST.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import erf, sqrt
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.workload.forms import distributions, unknown
from caraserve.bench.workload.traces import MOST_TOKENS, RequestTrace, Trace, needs_trace, read_lengths
from caraserve.errors import ConfigError

Tokens: TypeAlias = NDArray[np.int64]
Pair: TypeAlias = tuple[Tokens, Tokens]
Draw: TypeAlias = Callable[[np.random.Generator, int], Pair]

_PUNICA_SIGMA, _PUNICA_LOCATION, _PUNICA_SCALE, _PUNICA_TOTAL = 0.8, -1.0, 18.0, 2048


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of prompt and output lengths, with optional scaling and an optional limit."""

    name: str
    draw: Draw = field(repr=False)
    prompt_share: float = 1.0
    output_share: float = 1.0
    most_tokens: int | None = None  # of prompt and output together; None: no limit

    def sample(self, rng: np.random.Generator, count: int) -> Pair:
        """Returns prompt lengths and output lengths, int64 [count] each, all at least 1."""
        prompts, outputs = self.draw(rng, count)
        prompts, outputs = _times(prompts, self.prompt_share), _times(outputs, self.output_share)
        return (prompts, outputs) if self.most_tokens is None else shorten(prompts, outputs, self.most_tokens)


def parse_lengths(text: str, trace: Trace | None = None) -> Lengths:
    """Parses `lmsys`, `fixed:512/128` or `qmsum@0.5/1`; `trace` supplies the rows of the distribution `trace`."""
    text = text.strip()
    scale = re.fullmatch(r"(?P<name>.+)@(?P<prompt>[\d.e-]+)/(?P<output>[\d.e-]+)(?:/(?P<most>\d{1,9}))?", text)
    if scale is None:
        return Lengths(text, _draw_of(text, trace))
    try:
        shares = float(scale["prompt"]), float(scale["output"])
    except ValueError:
        raise ConfigError(f"lengths {text!r}: write NAME@PROMPT_SHARE/OUTPUT_SHARE[/MOST_TOKENS]") from None
    most_tokens = None if scale["most"] is None else int(scale["most"])
    for share in shares:
        if not 0 < share < 1e6:
            raise ConfigError(f"lengths {text!r}: a share of the lengths must be above 0, not {share:g}")
    if most_tokens is not None and most_tokens < 2:
        raise ConfigError(f"lengths {text!r}: a prompt and an answer need at least 2 tokens together")
    return Lengths(scale["name"], _draw_of(scale["name"], trace), *shares, most_tokens)


def shorten(prompts: Tokens, outputs: Tokens, most_tokens: int) -> Pair:
    """Shortens requests with more than `most_tokens` in total, prompt and output in proportion, each to at least 1."""
    totals = prompts + outputs
    long = totals > most_tokens
    fewer = (np.maximum(1, part * most_tokens // totals) for part in (prompts, outputs))
    short_prompts, short_outputs = fewer
    return np.where(long, short_prompts, prompts), np.where(long, short_outputs, outputs)


def _draw_of(text: str, trace: Trace | None) -> Draw:
    measured = distributions()["lengths"]
    name, _, rest = text.partition(":")
    if text in measured:
        return _by_quantiles(measured[text], distributions()["levels"])
    if name == "fixed" and (match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", rest)):
        return _uniform(text, *((int(tokens), int(tokens) + 1) for tokens in match.groups()))
    if name == "uniform" and (match := re.fullmatch(r"(\d{1,9})-(\d{1,9})/(\d{1,9})-(\d{1,9})", rest)):
        bounds = [int(bound) for bound in match.groups()]
        return _uniform(text, (bounds[0], bounds[1]), (bounds[2], bounds[3]))
    if text == "punica":
        return _punica
    if name == "file" and rest:
        return _rows(read_lengths(Path(rest)), in_order=False)
    if text == "trace":
        return _rows(needs_trace("lengths", trace), in_order=True)
    forms = ("fixed:PROMPT/OUTPUT", "uniform:LO-HI/LO-HI", "punica", "file:PATH", "trace")
    raise unknown("lengths", text, (*measured, *forms))


def _by_quantiles(entry: dict[str, Any], levels: list[float]) -> Draw:
    prompt_knots, output_knots = entry["prompt_tokens"]["knots"], entry["output_tokens"]["knots"]
    correlation = float(entry["correlation"])

    def draw(rng: np.random.Generator, count: int) -> Pair:
        first, second = rng.standard_normal((count, 2)).T
        second = correlation * first + sqrt(1 - correlation**2) * second
        # The quantiles are those of whole numbers, so interpolated values are rounded to the nearest.
        prompts = np.rint(np.interp(_percent_below(first), levels, prompt_knots))
        outputs = np.rint(np.interp(_percent_below(second), levels, output_knots))
        return _at_least_1(prompts), _at_least_1(outputs)

    return draw


def _percent_below(normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the cumulative standard normal distribution at each value, in percent."""
    shares = np.fromiter((erf(value) for value in normal / sqrt(2)), np.float64, len(normal))
    return 50 * (1 + shares)


def _uniform(text: str, *bounds: tuple[int, int]) -> Draw:
    for low, high in bounds:
        if not 1 <= low < high <= MOST_TOKENS:
            raise ConfigError(f"lengths {text!r}: from at least 1 token, to more than that, to at most {MOST_TOKENS}")
    lows, highs = zip(*bounds, strict=True)

    def draw(rng: np.random.Generator, count: int) -> Pair:
        prompts, outputs = rng.integers(lows, highs, (count, 2)).T
        return prompts, outputs

    return draw


def _punica(rng: np.random.Generator, count: int) -> Pair:
    normal = rng.standard_normal(count)
    prompts = _at_least_1(_PUNICA_LOCATION + _PUNICA_SCALE * np.exp(_PUNICA_SIGMA * normal))
    totals = rng.integers(0, _PUNICA_TOTAL, count)
    return prompts, np.maximum(2, totals - prompts)


def _rows(trace: Trace, *, in_order: bool) -> Draw:
    if not isinstance(trace, RequestTrace):
        raise ConfigError(f"lengths 'trace': {trace.source} has no lengths")
    total = len(trace.prompt_tokens)

    def draw(rng: np.random.Generator, count: int) -> Pair:
        rows = np.arange(count) % total if in_order else rng.integers(total, size=count)
        return _at_least_1(trace.prompt_tokens[rows]), _at_least_1(trace.output_tokens[rows])

    return draw


def _times(tokens: Tokens, share: float) -> Tokens:
    return tokens if share == 1 else _at_least_1(np.rint(tokens * share))


def _at_least_1(tokens: NDArray[Any]) -> Tokens:
    kept: Tokens = np.maximum(1, tokens).astype(np.int64)
    return kept
