"""Predicts the time of an instance's next iteration (Toppings §5, eq. 2), and refits the model while it serves.

`cost.py` needs a prediction for every candidate of a request, so one is a few multiplications on sums that heartbeats
carry. The functions at the top take plain numbers. `DriftWatch` compares predicted with observed times and refits a
model that has drifted: because of another clock speed, other load on the machine, or a profile made too quickly.
"""

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from caraserve.core.machine_profile import Profile, fit_times

Kernel = Literal["measured", "unpadded", "padded"]
"""`measured`: the profile's own fit, with a term for requests. `unpadded`, `padded`: eq. 2 for MBGMV and for BGMV."""

_WINDOW = 128  # observations: some seconds of iterations
_CHECK_EVERY = 32
_TOLERANCE = 0.10  # median relative error that calls for a refit; fits of a quiet machine are within 0.04
_GAIN = 0.9  # a refit must lower that error at least to this share of it; otherwise the times are only noisy
_LEAST_MS, _MOST_MS = 1e-6, 1e9  # a nanosecond and eleven days: sums, products and ratios of such times are finite


def decode_ms(
    alpha_ms: float, gamma_ms: float, beta_ms: float, padded: bool, requests: float, rank_sum: float, rank_max: float
) -> float:
    """Returns the time of one decode iteration (eq. 2). Base model requests have rank 0; an empty batch takes 0."""
    if requests == 0:
        return 0.0
    work = requests * rank_max if padded else rank_sum
    return alpha_ms * work + gamma_ms * requests + beta_ms


def prefill_ms(
    base_ms: float,
    token_ms: float,
    token_rank_ms: float,
    token_rank_max_ms: float,
    tokens: float,
    token_ranks: float,
    rank_max: float,
) -> float:
    """Returns the time of one iteration over prompts with `tokens` tokens in all; `token_ranks` is Σ tokens · rank, and
    `rank_max` the largest rank among them. No tokens take 0 ms.

    The usual kernels work by segment, so one prompt's rank does not pad another's: `token_rank_max_ms` is 0. Of padded
    kernels it is the time of each token for each unit of the largest rank."""
    if tokens == 0:
        return 0.0
    return base_ms + token_ms * tokens + token_rank_ms * token_ranks + token_rank_max_ms * (tokens * rank_max)


def mixed_ms(decoding_ms: float, beta_ms: float, prefilling_ms: float) -> float:
    """Returns the time of one iteration that decodes and prefills. It reads the weights and is launched once, which is
    `beta_ms` of a decode iteration: beside prompts, decoding requests add only what is above that."""
    if prefilling_ms == 0.0:
        return decoding_ms
    return max(decoding_ms, prefilling_ms + max(0.0, decoding_ms - beta_ms))


def iteration_ms(
    model: "PerfModel",
    requests: float,
    rank_sum: float,
    rank_max: float,
    tokens: float,
    token_ranks: float,
    prompt_rank_max: float,
) -> float:
    """Returns the time of one iteration with a token of each decoding request, and `tokens` tokens of prompts."""
    decoding_ms = decode_ms(model.alpha_ms, model.gamma_ms, model.beta_ms, model.padded, requests, rank_sum, rank_max)
    token_ms, by_sum_ms, by_max_ms = (
        model.prefill_token_ms,
        model.prefill_token_rank_ms,
        model.prefill_token_rank_max_ms,
    )
    prefilling_ms = prefill_ms(
        model.prefill_base_ms, token_ms, by_sum_ms, by_max_ms, tokens, token_ranks, prompt_rank_max
    )
    return mixed_ms(decoding_ms, model.beta_ms, prefilling_ms)


def operating_point(
    token_ms: float, beta_ms: float, prefill_share_ms: float, slo_ms: float, most_requests: int
) -> float:
    """Returns the tokens/s of one instance when all its requests have one rank and the time per token just meets the
    SLO (LoRAServe §IV-A). `token_ms` is the time that one more request adds to an iteration, `prefill_share_ms` its
    prompt's time divided by the tokens of its answer. If even one request misses the SLO, the rate is that of one
    request. A time too short to measure counts as a nanosecond, so that the result is finite."""
    each_ms = max(token_ms + prefill_share_ms, _LEAST_MS)
    requests = float(most_requests)
    if requests * each_ms > slo_ms - beta_ms:
        requests = max(1.0, math.floor((slo_ms - beta_ms) / each_ms))
    return 1000.0 * requests / (beta_ms + requests * each_ms)


@dataclass(frozen=True, slots=True)
class PerfModel:
    """One instance's coefficients, which it publishes; a fleet may mix machines.

    Raises ValueError if a coefficient is not a time, or if decoding or prefilling with the base model would take no
    time at all: other code divides by these times, and an instance that claims no time would be sent every request.
    """

    alpha_ms: float  # decode, for each unit of rank
    gamma_ms: float  # decode, for each request; eq. 2 has none
    beta_ms: float  # decode, for each iteration
    padded: bool  # a batch's work is requests · largest rank; otherwise Σ rank
    prefill_base_ms: float
    prefill_token_ms: float
    prefill_token_rank_ms: float
    prefill_token_rank_max_ms: float = 0.0  # for each token and unit of the largest rank, of padded kernels

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= _MOST_MS:  # a peer sent it
                raise ValueError(f"{field.name} of a performance model is {value}; use 0 to {_MOST_MS:g}")
        if self.gamma_ms + self.beta_ms < _LEAST_MS:
            raise ValueError("by this performance model decoding takes no time; gamma_ms or beta_ms has to be positive")
        if self.prefill_base_ms + self.prefill_token_ms < _LEAST_MS:
            raise ValueError(
                "by this performance model prefilling takes no time; prefill_base_ms or prefill_token_ms has to be "
                "positive"
            )

    @classmethod
    def of(cls, profile: Profile, kernel: Kernel = "measured", padded_rank: int | None = None) -> Self:
        """Builds the model from one of a profile's three fits. `padded_rank`: the rank that kernels compute for every
        adapter, whatever its own; a request's cost is then the same in any batch. Where the measured kernels pad to the
        largest rank in the batch instead, prompts included, it is not used."""
        decode, prefill = profile.decode, profile.prefill
        line = {"unpadded": decode.unpadded, "padded": decode.padded}.get(kernel)
        alpha_ms, gamma_ms, beta_ms = (
            (line.alpha_ms, 0.0, line.beta_ms) if line else (decode.alpha_ms, decode.gamma_ms, decode.beta_ms)
        )
        token_ms, token_rank_ms = prefill.per_token_ms, prefill.per_token_rank_ms
        padded = kernel == "padded" or (kernel == "measured" and decode.is_padded)
        if padded_rank is not None and not padded:
            alpha_ms, gamma_ms = 0.0, gamma_ms + alpha_ms * padded_rank
            token_rank_ms, token_ms = 0.0, token_ms + token_rank_ms * padded_rank
        by_rank_ms = (0.0, token_rank_ms) if kernel == "measured" and padded else (token_rank_ms, 0.0)
        return cls(alpha_ms, gamma_ms, beta_ms, padded, prefill.base_ms, token_ms, *by_rank_ms)

    def decode_ms(self, requests: int, rank_sum: int, rank_max: int) -> float:
        """Predicts an iteration that computes one token for each of the batch's requests."""
        return decode_ms(self.alpha_ms, self.gamma_ms, self.beta_ms, self.padded, requests, rank_sum, rank_max)

    def prefill_ms(self, tokens: int, token_ranks: int, rank_max: int = 0) -> float:
        """Predicts an iteration over prompts with `tokens` tokens in all; `token_ranks` is Σ tokens · rank, `rank_max`
        the largest rank among them."""
        return self.iteration_ms(0, 0, 0, tokens, token_ranks, rank_max)

    def iteration_ms(
        self, requests: int, rank_sum: int, rank_max: int, tokens: int, token_ranks: int, prompt_rank_max: int = 0
    ) -> float:
        """Predicts an iteration with a token of each decoding request, and `tokens` tokens of prompts."""
        return iteration_ms(self, requests, rank_sum, rank_max, tokens, token_ranks, prompt_rank_max)

    def operating_point(
        self, rank: int, slo_ms: float, prompt_tokens: float, output_tokens: float, most_requests: int
    ) -> float:
        """Returns the tokens/s of answers to typical requests of one rank under the SLO (LoRAServe §IV-A)."""
        token_rank_ms = self.prefill_token_rank_ms + self.prefill_token_rank_max_ms
        prefill = self.prefill_base_ms + prompt_tokens * (self.prefill_token_ms + rank * token_rank_ms)
        token_ms = self.alpha_ms * rank + self.gamma_ms
        return operating_point(token_ms, self.beta_ms, prefill / output_tokens, slo_ms, most_requests)


class _Line:
    """Fits ms = Σ coefficient · x to the latest 128 iterations. Errors are relative to the observed time, so that short
    iterations count as much as long ones."""

    def __init__(self, coefficients: Sequence[float], anchors: Sequence[Sequence[float]]) -> None:
        self.coefficients = tuple(coefficients)
        self._anchors = [tuple(anchor) for anchor in anchors]
        self._seen: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_WINDOW)
        self._until_check = _CHECK_EVERY

    def observe(self, x: Sequence[float], ms: float) -> bool:
        """Records one iteration's time. Returns True if the coefficients have changed."""
        if not 0 < ms < math.inf:
            return False
        self._seen.append((tuple(x), ms))
        self._until_check -= 1
        if self._until_check > 0:
            return False
        self._until_check = _CHECK_EVERY
        return len(self._seen) >= _WINDOW // 2 and self.error > _TOLERANCE and self._refit()

    @property
    def error(self) -> float:
        """Median of |predicted - observed| ÷ observed; 0 before the first observation."""
        return self._error(self.coefficients)

    def _error(self, coefficients: Sequence[float]) -> float:
        errors = [abs(_value(coefficients, x) - ms) / ms for x, ms in self._seen]
        return statistics.median(errors) if errors else 0.0

    def _refit(self) -> bool:
        # Batches of one kind do not show the times of another, and from equal batches any slope would fit. So the
        # profile's points are fitted too, scaled by the median ratio of observed to predicted times.
        ratios = [ms / predicted for x, ms in self._seen if (predicted := _value(self.coefficients, x)) > 0]
        ratio = statistics.median(ratios) if ratios else 1.0
        anchored = [(x, ratio * ms) for x in self._anchors if (ms := _value(self.coefficients, x)) > 0]
        # Rows divided by their times: least squares then minimises relative errors, and a pause weighs at most 1.
        rows = [*self._seen, *anchored]
        columns = zip(*([value / ms for value in x] for x, ms in rows), strict=True)
        found, _ = fit_times([list(column) for column in columns], [1.0] * len(rows))
        if self._error(found) > _GAIN * self.error:
            return False
        self.coefficients = found
        return True


def _value(coefficients: Sequence[float], x: Sequence[float]) -> float:
    return sum(map(float.__mul__, coefficients, map(float, x)))


class DriftWatch:
    """Refits one instance's model to the times it observes. `model` is the one to publish."""

    def __init__(self, profile: Profile, kernel: Kernel = "measured", padded_rank: int | None = None) -> None:
        self.model = model = PerfModel.of(profile, kernel, padded_rank)
        self.refits = 0
        self._with_requests = kernel == "measured"
        self._pads_prompts = self._with_requests and model.padded
        decode_points = profile.decode.points
        self._decode = _Line(
            (model.alpha_ms, model.beta_ms, *([model.gamma_ms] if self._with_requests else [])),
            [self._decode_row(point.batch, point.rank_sum, point.rank_max) for point in decode_points],
        )
        self._prefill = _Line(
            (
                model.prefill_base_ms,
                model.prefill_token_ms,
                model.prefill_token_rank_ms + model.prefill_token_rank_max_ms,
            ),
            [(1.0, point.tokens, point.tokens * point.rank) for point in profile.prefill.points],
        )

    def observe_decode(self, requests: int, rank_sum: int, rank_max: int, ms: float) -> bool:
        """Records an iteration that only decoded. Returns True if `model` has changed."""
        if requests == 0 or not self._decode.observe(self._decode_row(requests, rank_sum, rank_max), ms):
            return False
        alpha_ms, beta_ms, *gamma_ms = self._decode.coefficients
        return self._take(alpha_ms=alpha_ms, beta_ms=beta_ms, gamma_ms=gamma_ms[0] if gamma_ms else 0.0)

    def observe_prefill(self, tokens: int, token_ranks: int, rank_max: int, ms: float) -> bool:
        """Records an iteration that only prefilled. Returns True if `model` has changed."""
        work = tokens * rank_max if self._pads_prompts else token_ranks
        if tokens == 0 or not self._prefill.observe((1.0, tokens, work), ms):
            return False
        base_ms, token_ms, token_rank_ms = self._prefill.coefficients
        by_rank = "prefill_token_rank_max_ms" if self._pads_prompts else "prefill_token_rank_ms"
        return self._take(prefill_base_ms=base_ms, prefill_token_ms=token_ms, **{by_rank: token_rank_ms})

    def _take(self, **coefficients_ms: float) -> bool:
        """Replaces coefficients of the model. Returns False if the result is not valid: times of one kind of batch may
        fit a line through zero."""
        try:
            self.model = PerfModel(**(dataclasses.asdict(self.model) | coefficients_ms))
        except ValueError:
            return False
        self.refits += 1
        return True

    @property
    def decode_error(self) -> float:
        """Median relative error of the latest 128 decode iterations."""
        return self._decode.error

    @property
    def prefill_error(self) -> float:
        """Median relative error of the latest 128 prefill iterations."""
        return self._prefill.error

    def _decode_row(self, requests: int, rank_sum: int, rank_max: int) -> tuple[float, ...]:
        work = requests * rank_max if self.model.padded else rank_sum
        return (float(work), 1.0, float(requests)) if self._with_requests else (float(work), 1.0)
