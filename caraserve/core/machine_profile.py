"""The machine profile: measured times of one machine with one model, and the times that they predict.

`profiling/measure.py` measures it; scheduling and routing use its predictions, which depend on the profile alone.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from caraserve.errors import ConfigError
from caraserve.util.cache_folder import cache_folder

SCHEMA = 4  # increases when a field changes its name or meaning

Targets = Literal["qkv", "all"]  # modules that read the attention's input; or all of a layer

_LEAST_MS = 1e-6  # of a measured time: errors are relative
_KNEE_GAIN = 0.5  # most squared errors of a curve with a knee, over those of one without
_NEARLY = 1.5  # squared errors of curves that are nearly equal, over those of the best
_FIXED_SHARE = 0.2  # of the time of a slice, at the knee
ASSUMED_HANDOFF_MS = 0.05  # if not measured; 0.04 ms for 16 tokens and one worker on a Zen 5 core
LEAST_HANDOFF_MS = 0.002  # x, a request, deltas and an answer pass from core to core; less is a mistake of the clock


def fit_times(columns: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Fits Σ c[i] · columns[i] ≈ values by least squares with all c[i] ≥ 0. Returns the coefficients and R².

    More work never takes less time, so a negative coefficient is noise: the column with the most negative one is left
    out, until none is negative. A column that depends linearly on those before it gets 0.
    """
    matrix, y = np.array(columns, float).T, np.array(values, float)
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)  # tokens · rank and 1 differ by a factor of 10^6
    left, coefficients = list(range(len(columns))), np.zeros(len(columns))
    while left:
        used: list[int] = []
        for index in left:
            if np.linalg.matrix_rank(scaled[:, [*used, index]]) > len(used):
                used.append(index)
        coefficients[:] = 0.0
        coefficients[used] = np.linalg.lstsq(scaled[:, used], y)[0] / lengths[used]
        if coefficients.min() >= 0:
            break
        left.remove(int(coefficients.argmin()))
    return tuple(coefficients.tolist()), _r2(matrix @ coefficients, y)


def _r2(predicted: ArrayLike, measured: ArrayLike) -> float:
    y = np.asarray(measured, float)
    residual, total = ((np.asarray(predicted, float) - y) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    return float(1.0 - residual / total) if total else 1.0


@dataclass(frozen=True, slots=True)
class LoraRate:
    """The speed at which ONE core computes the LoRA of one layer's modules, with weights streamed from memory:
    `ms = fixed + 1000 · tokens / tokens_per_s`."""

    rank: int
    targets: Targets
    tokens_per_s: float
    fixed_ms: float  # for reading the weights, however few tokens there are

    @classmethod
    def fitted(cls, rank: int, targets: Targets, times_ms: Mapping[int, float]) -> Self:
        """Fits times by number of tokens. The least squares are of relative errors, because the fixed time shows only
        where there are few tokens."""
        columns = [[1 / ms for ms in times_ms.values()], [tokens / ms for tokens, ms in times_ms.items()]]
        (fixed_ms, token_ms), _ = fit_times(columns, [1.0] * len(times_ms))
        if token_ms == 0.0:  # noise exceeded the effect of the tokens
            return cls(rank, targets, max(1000 * tokens / ms for tokens, ms in times_ms.items()), 0.0)
        return cls(rank, targets, 1000 / token_ms, fixed_ms)


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A measured iteration over one prompt of `tokens`, its adapter on all modules. Rank 0: the base model."""

    tokens: int
    rank: int
    ms: float


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """`ms = max(least, base + tokens · per_token)`, and with an adapter `lora + tokens · rank · per_token_rank` more.

    A device with many cores computes a few tokens as fast as it reads the weights, `least`; the kernels of an adapter
    take it some time, `lora`, however few tokens there are.
    """

    least_ms: float
    base_ms: float
    per_token_ms: float
    lora_ms: float
    per_token_rank_ms: float
    r2: float

    @classmethod
    def fitted(cls, points: Sequence[PrefillPoint]) -> Self:
        """Fits the points by least squares of relative errors: once without `least_ms`, and with each number of the
        smallest sizes as those that take it. A curve with it must be clearly better, because noise makes steps, too; of
        nearly equal ones, the one with most of the sizes counts."""
        points = [dataclasses.replace(point, ms=max(point.ms, _LEAST_MS)) for point in points]
        sizes = sorted({point.tokens for point in points})
        line, *curves = (cls._fitted(points, size) for size in (0, *sizes[:-1]))
        most_error = min([_KNEE_GAIN * line._error(points), *(_NEARLY * curve._error(points) for curve in curves)])
        return next((curve for curve in reversed(curves) if curve._error(points) <= most_error), line)

    @classmethod
    def _fitted(cls, points: Sequence[PrefillPoint], flat_tokens: int) -> Self:
        """Fits the points, of which those of up to `flat_tokens` take `least_ms`. Where few points leave a choice, time
        counts for the tokens rather than for each iteration."""
        columns = [
            [float(point.tokens <= flat_tokens) for point in points],
            [float(point.tokens) * (point.tokens > flat_tokens) for point in points],
            [float(point.tokens > flat_tokens) for point in points],
            [float(point.tokens * point.rank) for point in points],
            [float(point.rank > 0) for point in points],
        ]
        relative = [[value / point.ms for value, point in zip(each, points, strict=True)] for each in columns]
        (least_ms, per_token_ms, base_ms, per_token_rank_ms, lora_ms), _ = fit_times(relative, [1.0] * len(points))
        curve = cls(least_ms, base_ms, per_token_ms, lora_ms, per_token_rank_ms, r2=0.0)
        predicted = [curve.ms(point.tokens, point.rank) for point in points]
        return dataclasses.replace(curve, r2=_r2(predicted, [point.ms for point in points]))

    def _error(self, points: Sequence[PrefillPoint]) -> float:
        return sum((self.ms(point.tokens, point.rank) / point.ms - 1) ** 2 for point in points)

    def ms(self, tokens: int, rank: int) -> float:
        """Returns the time of one iteration over `tokens` of a prompt."""
        lora_ms = self.lora_ms + tokens * rank * self.per_token_rank_ms if rank else 0.0
        return max(self.least_ms, self.base_ms + tokens * self.per_token_ms) + lora_ms


@dataclass(frozen=True, slots=True)
class Prefill:
    """The curve through the points, and for routers a line: `ms = base + tokens · per_token + tokens · rank ·
    per_token_rank`."""

    points: tuple[PrefillPoint, ...]
    curve: PrefillCurve
    base_ms: float
    per_token_ms: float
    per_token_rank_ms: float
    r2: float  # of the line

    @classmethod
    def fitted(cls, points: Sequence[PrefillPoint]) -> Self:
        """Fits the points by least squares."""
        columns = [
            [1.0 for _ in points],
            [float(point.tokens) for point in points],
            [float(point.tokens * point.rank) for point in points],
        ]
        (base_ms, per_token_ms, per_token_rank_ms), r2 = fit_times(columns, [point.ms for point in points])
        return cls(tuple(points), PrefillCurve.fitted(points), base_ms, per_token_ms, per_token_rank_ms, r2)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A measured iteration of one token for each of `batch` requests with an adapter each. Rank 0: the base model."""

    batch: int
    rank_sum: int
    rank_max: int
    ms: float


@dataclass(frozen=True, slots=True)
class LineFit:
    """`ms = alpha · x + beta`. The field that holds it defines x."""

    alpha_ms: float
    beta_ms: float
    r2: float

    @classmethod
    def fitted(cls, x: Sequence[float], times_ms: Sequence[float]) -> Self:
        """Fits the points by least squares."""
        (alpha_ms, beta_ms), r2 = fit_times([x, [1.0] * len(x)], times_ms)
        return cls(alpha_ms, beta_ms, r2)


@dataclass(frozen=True, slots=True)
class Decode:
    """The prediction `ms = alpha · work + gamma · requests + beta`, and two fits for the kernels of the papers.

    Work is Σ ranks, or requests · largest rank where the kernels pad to the largest rank in the batch.
    """

    points: tuple[DecodePoint, ...]
    padded: LineFit  # x = requests · largest rank
    unpadded: LineFit  # x = Σ ranks
    alpha_ms: float
    gamma_ms: float
    beta_ms: float
    r2: float
    is_padded: bool = False

    @classmethod
    def fitted(cls, points: Sequence[DecodePoint], *, is_padded: bool = False) -> Self:
        """Fits all three forms to the points by least squares."""
        times_ms, ones = [point.ms for point in points], [1.0 for _ in points]
        sums = [float(point.rank_sum) for point in points]
        batches = [float(point.batch) for point in points]
        largest = [float(point.batch * point.rank_max) for point in points]
        padded = LineFit.fitted(largest, times_ms)
        unpadded = LineFit.fitted(sums, times_ms)
        (alpha_ms, gamma_ms, beta_ms), r2 = fit_times([largest if is_padded else sums, batches, ones], times_ms)
        return cls(tuple(points), padded, unpadded, alpha_ms, gamma_ms, beta_ms, r2, is_padded)


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of one machine with one model, given by their keys. A `quick` profile has fewer points and
    repeats."""

    schema: int
    machine: str
    model: str
    made_unix_s: float
    quick: bool
    link_bytes_per_s: float  # of copies from host to device
    link_latency_ms: float  # of each such copy, of any size
    handoff_ms: float | None  # round trip to a CPU LoRA worker beyond its compute; None: not measured
    lora: tuple[LoraRate, ...]  # ranks rise within each target set
    prefill: Prefill
    decode: Decode

    def __post_init__(self) -> None:
        rates = [rate for rate in self.lora if rate.rank > 0 and rate.tokens_per_s > 0 and rate.fixed_ms >= 0]
        if self.link_bytes_per_s <= 0 or {rate.targets for rate in rates} != {"qkv", "all"} or rates != [*self.lora]:
            raise ValueError("a rate is missing or not above zero")
        if self.handoff_ms is not None and self.handoff_ms < LEAST_HANDOFF_MS:
            raise ValueError(f"handoff_ms is {self.handoff_ms:g}, and no hand-off is faster than {LEAST_HANDOFF_MS} ms")
        for targets in ("qkv", "all"):
            ranks = [rate.rank for rate in self.lora if rate.targets == targets]
            if ranks != sorted(set(ranks)):
                raise ValueError("the ranks of lora do not rise")

    # --- predictions ---

    def prefill_ms(self, tokens: int, rank: int) -> float:
        """Returns the time of one iteration over `tokens` of a prompt."""
        return self.prefill.curve.ms(tokens, rank)

    def decode_ms(self, ranks: Sequence[int]) -> float:
        """Returns the time of one iteration for requests with adapters of these ranks (0: base model)."""
        if not ranks:
            return 0.0
        fit = self.decode
        work = len(ranks) * max(ranks) if fit.is_padded else sum(ranks)
        return fit.alpha_ms * work + fit.gamma_ms * len(ranks) + fit.beta_ms

    def load_ms(self, num_bytes: int) -> float:
        """Returns the time of one copy of `num_bytes` from host to device."""
        return self.link_latency_ms + 1000 * num_bytes / self.link_bytes_per_s

    def cpu_lora_ms(self, tokens: int, rank: int, targets: Targets) -> float:
        """Returns ONE core's time for one layer's modules, without the hand-off."""
        fixed_ms, token_ms = self._lora_times(rank, targets)
        return fixed_ms + tokens * token_ms

    def tokens_per_worker(self, rank: int, targets: Targets = "qkv") -> int:
        """Returns the maximum tokens of one layer's hand-off for one core: the knee of its time over the tokens.

        From there on the time rises nearly in proportion to the tokens, and another worker saves most of its share.
        With fewer tokens it would spend too much of its time on the hand-off and on reading the weights again.
        """
        fixed_ms, token_ms = self._lora_times(rank, targets)
        handoff_ms = ASSUMED_HANDOFF_MS if self.handoff_ms is None else self.handoff_ms
        return max(1, round((1 / _FIXED_SHARE - 1) * (fixed_ms + handoff_ms) / token_ms))

    def _lora_times(self, rank: int, targets: Targets) -> tuple[float, float]:
        """Returns the fixed ms and the ms of a token, for one layer's modules on one core.

        Both are linear in the rank between measured ranks and beyond them. Below the least measured rank they are
        constant, because kernels pad to that rank.
        """
        known = [rate for rate in self.lora if rate.targets == targets]
        above = next((index for index, rate in enumerate(known) if rate.rank >= rank), len(known))
        if above == 0:
            low, high, share = known[0], known[0], 0.0
        elif above == len(known):
            high, share = known[-1], rank / known[-1].rank
            return share * high.fixed_ms, share * 1000 / high.tokens_per_s
        else:
            low, high = known[above - 1], known[above]
            share = (rank - low.rank) / (high.rank - low.rank)
        return (
            low.fixed_ms + share * (high.fixed_ms - low.fixed_ms),
            1000 * ((1 - share) / low.tokens_per_s + share / high.tokens_per_s),
        )

    # --- files ---

    def save(self, path: Path) -> None:
        """Writes readable JSON. The file is replaced as a whole. Raises ConfigError."""
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise ConfigError(f"the profile cannot be written to {path}: {error.strerror}") from None


class OtherSchema(ConfigError):
    """The error of a profile that another version has written."""


def load(path: Path) -> Profile:
    """Reads a profile that `save` wrote. Raises ConfigError for a damaged file, or OtherSchema."""
    again = "run `caraserve profile` again"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error.strerror}; {again}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"the profile {path} is not valid JSON; {again}") from None
    if isinstance(fields, dict) and fields.get("schema", SCHEMA) != SCHEMA:
        raise OtherSchema(
            f"the profile {path} has schema {fields['schema']!r:.20}, this version reads {SCHEMA}; {again}"
        )
    try:
        profile: Profile = _parsed(Profile, fields, "profile")
    except ValueError as error:
        raise ConfigError(f"the profile {path} is damaged: {error}; {again}") from None
    return profile


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """Converts `value` from JSON to `kind`. Raises ValueError that names the wrong field."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError(f"{where} must have the fields {', '.join(hints)}")
        return kind(**{name: _parsed(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})  # type: ignore[operator]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_parsed(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Literal and value in arguments:
        return value
    if origin is types.UnionType:
        return None if value is None else _parsed(arguments[0], value, where)
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is not float and type(value) is kind:
        return value
    raise ValueError(f"{where} has a wrong value")


# --- names ---


def machine_key(accelerator: str = "") -> str:
    """Returns the key of this machine: its CPU, the number of cores for this process, and the accelerator in use."""
    cores = len(os.sched_getaffinity(0))
    key = f"{_slug(_cpu_name())}-{cores}-core{'s' if cores > 1 else ''}"
    return f"{key}-{_slug(accelerator)}" if accelerator else key


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()  # Arm's cpuinfo has no name


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60]


def default_path(machine: str, model: str) -> Path:
    """Returns the file for a profile: a readable name, and a digest that distinguishes equal names."""
    digest = hashlib.sha256(f"{machine}\n{model}".encode()).hexdigest()[:8]
    return cache_folder("profiles") / f"{_slug(machine)}--{_slug(model)}-{digest}.json"
