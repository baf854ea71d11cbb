"""Which adapter, if any, is merged into the base weights, and who is served meanwhile: dLoRA's rule. Pure.

`loop.py` asks once a turn, in the loading mode `merged` alone. A merged adapter needs no LoRA kernels, but serves only
its own requests. dLoRA (OSDI 2024) merges when most requests ask for one adapter, keeps accounts of credits so that
whoever is passed over comes first in the end, and learns from each phase whether merging paid. Constants are those of
the paper's published artifact.

The base model has an account like any adapter, and its requests count like any others; but it is never merged, so they
wait while an adapter is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from caraserve.core.batch import BASE_ADAPTER_SLOT

CREDITS = 10_000.0  # of an account at the start, for each of the other accounts
# Iteration times with an adapter merged and with LoRA kernels, and the cost of a switch: the artifact's profile of
# Llama 7B. Only their ratios matter, and only at first: the thresholds adapt.
MERGED_S, UNMERGED_S, SWITCH_S = 0.015, 0.027, 0.02
SPEED = MERGED_S / UNMERGED_S
STEP, FACTOR = 0.05, 1.1  # by which thresholds adapt: additively if a phase paid, by a factor if it did not


@dataclass(frozen=True, slots=True)
class MergeDecision:
    """One iteration. `serve`: indices of the requests that may take part, first served first; the others wait.
    `merged`: the adapter that all of them ask for, merged into the weights; None: LoRA kernels, any mix."""

    merged: int | None
    serve: tuple[int, ...]


@dataclass(slots=True)
class _Phase:
    """Iterations between two switches, counted both as they were and as they would have been."""

    iterations: int = 0
    merged_requests: int = 0  # in batches of one adapter
    unmerged_requests: int = 0  # in mixed batches
    favourite: int | None = None  # adapter with the most requests
    switches: int = 0  # that merging the favourite would have taken

    def merging_gain(self, merged: bool) -> float:
        """By how many requests a second batches of one adapter were better than mixed ones; each switch has a cost."""
        merged_s = MERGED_S * self.iterations + SWITCH_S * (1 if merged else self.switches)
        unmerged_s = UNMERGED_S * self.iterations + SWITCH_S * (0 if merged else 1)
        return self.merged_requests / merged_s - self.unmerged_requests / unmerged_s


class MergePolicy:
    """Accounts and thresholds. `merge_threshold`: the share of requests for one adapter from which it is merged;
    `stay_threshold`: the share down to which it stays so."""

    def __init__(self, max_num_seqs: int, credits_each: float = CREDITS) -> None:
        self.merge_threshold, self.stay_threshold = 1.0, SPEED
        self._max, self._unit = max_num_seqs, credits_each
        self._credits: dict[int, float] = {}
        self._favoured: set[int] = set()
        self._merged: int | None = None
        self._phase = _Phase()

    def credits_of(self, adapter: int) -> float:
        """The account of an adapter that has been asked for."""
        return self._credits[adapter]

    def choose(self, adapters: Sequence[int]) -> MergeDecision:
        """`adapters`: what each request asks for (BASE_ADAPTER_SLOT: the base model), by arrival."""
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
        """All have the same credits at first. A newcomer raises the bar for all, so it raises all accounts with it:
        nobody comes nearer to being served first, nor farther from it."""
        for adapter in dict.fromkeys(adapters):
            if adapter not in self._credits:
                self._credits = {other: credit + self._unit for other, credit in self._credits.items()}
                self._credits[adapter] = self._unit * len(self._credits)

    def _favour(self) -> list[int]:
        """Accounts above the bar, the richest first; once there, they stay until half a unit below it."""
        bar = self._unit * len(self._credits)
        favoured = [
            adapter
            for adapter, credit in self._credits.items()
            if credit >= (bar - self._unit / 2 if adapter in self._favoured else bar)
        ]
        self._favoured = set(favoured)
        return sorted(favoured, key=lambda adapter: -self._credits[adapter])

    def _serve_first(self, first: list[int], fcfs: range, adapters: Sequence[int]) -> MergeDecision:
        """A mixed batch that begins with favoured requests. Each that passes another one pays for it."""
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
        """The adapter to be merged, if any; `batch`: requests of a mixed batch."""
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
        """What paid in the phase that ends comes sooner next time, what did not comes later: after a merged phase the
        threshold for merging moves, after an unmerged one that for staying merged.

        None rises above 1, unlike the artifact's: only requests in slots are counted here, so that a larger share never
        comes, and nothing would ever be merged again.
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
