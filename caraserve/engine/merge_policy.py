"""Chooses the adapter that is merged into the base weights, and the requests served meanwhile: dLoRA's rule. No I/O.

The executor uses it in each turn of the loading mode `merged`. While an adapter is merged, the iteration needs no LoRA
kernels, but computes only requests of that adapter. dLoRA (OSDI 2024) merges an adapter that most requests need, keeps
credits per adapter so that requests which were passed over are served first in the end, and adapts its thresholds after
each phase, by whether merging served more requests. Constants are those of the paper's published artifact.

The base model has credits like any adapter, and its requests count like any others. It is never merged, so its requests
wait while an adapter is. Requests for adapters that cannot be merged count as the base model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from caraserve.core.batch import BASE_ADAPTER_SLOT

CREDITS = 10_000.0  # of an adapter at the start, for each of the other adapters
# Iteration times with an adapter merged and with LoRA kernels, and the cost of a switch: the artifact's profile of
# Llama 7B. Only their ratios matter, and only at the start, because the thresholds adapt.
MERGED_S, UNMERGED_S, SWITCH_S = 0.015, 0.027, 0.02
SPEED = MERGED_S / UNMERGED_S
STEP, FACTOR = 0.05, 1.1  # by which thresholds adapt: by the step if a phase gained requests, by the factor if not


@dataclass(frozen=True, slots=True)
class MergeDecision:
    """The decision for one iteration. `serve`: indices of the requests that may take part, first served first; the
    others wait. `merged`: the adapter of all of them, merged into the weights; None: LoRA kernels, any mix."""

    merged: int | None
    serve: tuple[int, ...]


@dataclass(slots=True)
class _Phase:
    """Iterations between two switches, and their requests if they had been merged and if they had not."""

    iterations: int = 0
    merged_requests: int = 0  # in batches of one adapter
    unmerged_requests: int = 0  # in mixed batches
    favourite: int | None = None  # adapter with the most requests
    switches: int = 0  # that merging the favourite in each iteration would have needed

    def merging_gain(self, merged: bool) -> float:
        """Returns the requests per second of one adapter's batches, minus those of mixed ones, switches included."""
        merged_s = MERGED_S * self.iterations + SWITCH_S * (1 if merged else self.switches)
        unmerged_s = UNMERGED_S * self.iterations + SWITCH_S * (0 if merged else 1)
        return self.merged_requests / merged_s - self.unmerged_requests / unmerged_s


class MergePolicy:
    """Credits and thresholds. `merge_threshold`: an adapter is merged from this share of the requests on;
    `stay_threshold`: it stays merged down to this share."""

    def __init__(self, max_num_seqs: int, credits_each: float = CREDITS) -> None:
        self.merge_threshold, self.stay_threshold = 1.0, SPEED
        self._max, self._unit = max_num_seqs, credits_each
        self._credits: dict[int, float] = {}
        self._favoured: set[int] = set()
        self._merged: int | None = None
        self._phase = _Phase()

    def credits_of(self, adapter: int) -> float:
        """Returns the credits of an adapter that has had requests."""
        return self._credits[adapter]

    def choose(self, adapters: Sequence[int]) -> MergeDecision:
        """Chooses what to serve next. `adapters`: each request's adapter slot, or BASE_ADAPTER_SLOT, by arrival."""
        if not adapters:
            return MergeDecision(None, ())
        self._open_accounts(adapters)
        requests: dict[int, list[int]] = {}
        for index, adapter in enumerate(adapters):
            requests.setdefault(adapter, []).append(index)
        first = [index for adapter in self._favour() for index in requests.get(adapter, ())]
        fcfs = range(min(len(adapters), self._max))
        if first:
            return self._serve_first(first, fcfs, adapters)
        merged = self._merge(requests, len(fcfs))
        if merged is None:
            return MergeDecision(None, tuple(fcfs))
        serve = requests[merged][: self._max]
        for index in set(fcfs) - set(serve):
            self._pay(merged, adapters[index], 0.5 / (SPEED * self._max))
        return MergeDecision(merged, tuple(serve))

    def _open_accounts(self, adapters: Sequence[int]) -> None:
        """Gives new adapters their credits. Each new adapter raises the bar for being served first by one unit, so it
        also raises the credits of all others by one: their distances from the bar stay the same."""
        for adapter in dict.fromkeys(adapters):
            if adapter not in self._credits:
                self._credits = {other: credit + self._unit for other, credit in self._credits.items()}
                self._credits[adapter] = self._unit * len(self._credits)

    def _favour(self) -> list[int]:
        """Returns the adapters to be served first, most credits first. An adapter is added at the bar, and removed when
        it is more than half a unit below."""
        bar = self._unit * len(self._credits)
        favoured = [
            adapter
            for adapter, credit in self._credits.items()
            if credit >= (bar - self._unit / 2 if adapter in self._favoured else bar)
        ]
        self._favoured = set(favoured)
        return sorted(favoured, key=lambda adapter: -self._credits[adapter])

    def _serve_first(self, first: list[int], fcfs: range, adapters: Sequence[int]) -> MergeDecision:
        """Returns a mixed batch that begins with the requests `first`; each pays the one that it displaces credits."""
        self._switch_to(None)
        serve = [*first, *sorted(set(fcfs) - set(first))][: self._max]
        displaced = sorted(set(fcfs) - set(serve))
        ahead = [index for index in serve if index not in fcfs]
        for index, other in zip(ahead, displaced, strict=True):
            self._pay(adapters[index], adapters[other], 1 / self._max)
        return MergeDecision(None, tuple(serve))

    def _pay(self, payer: int, receiver: int, cost: float) -> None:
        self._credits[payer] -= cost
        self._credits[receiver] += cost

    def _merge(self, requests: dict[int, list[int]], batch: int) -> int | None:
        """Returns the adapter to be merged, or None, and counts the iteration. `batch`: requests of a mixed batch."""
        counts = {
            adapter: len(indices)
            for adapter, indices in requests.items()
            if adapter != BASE_ADAPTER_SLOT and self._credits[adapter] >= 0
        }
        favourite = max(counts, key=lambda adapter: counts[adapter], default=None)
        merged = None
        if self._merged is not None and counts.get(self._merged, 0) >= self.stay_threshold * batch:
            merged = self._merged
        elif favourite is not None and counts[favourite] >= self.merge_threshold * batch:
            merged = favourite
        self._switch_to(merged)
        counted = favourite if merged is None else merged
        phase = self._phase
        if merged is None and favourite != phase.favourite:
            phase.favourite, phase.switches = favourite, phase.switches + 1
        phase.iterations += 1
        phase.merged_requests += 0 if counted is None else min(counts[counted], self._max)
        phase.unmerged_requests += batch
        return merged

    def _switch_to(self, merged: int | None) -> None:
        if merged == self._merged:
            return
        if self._phase.iterations:
            self._adapt(self._phase.merging_gain(self._merged is not None))
        self._merged, self._phase = merged, _Phase()

    def _adapt(self, gain: float) -> None:
        """Adapts a threshold to the gain of merging in the phase that ends: after a merged phase `merge_threshold`,
        after an unmerged one `stay_threshold`. A gain makes merging more likely, a loss less.

        Unlike in the artifact, no threshold rises above 1: only requests in slots are counted here, so their share
        never exceeds 1, and nothing would ever be merged again.
        """
        if self._merged is not None:
            if gain > 0 and self.merge_threshold - STEP > self.stay_threshold:
                self.merge_threshold -= STEP
            elif gain < 0:
                self.merge_threshold = min(1.0, self.merge_threshold * FACTOR)
        elif gain < 0 and self.stay_threshold + STEP < self.merge_threshold:
            self.stay_threshold += STEP
        elif gain > 0:
            self.stay_threshold /= FACTOR
