"""What both sides of the benchmark are asked, and what they give back.

Neither torch nor the server is imported here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caraserve.bench.synthetic import ITEMSIZE
from caraserve.model.spec import ModelSpec

SITUATIONS = ("base", "one adapter", "own adapters")


@dataclass(frozen=True, slots=True)
class Case:
    """`concurrency` requests sent at once; `situation` is one of SITUATIONS."""

    situation: str
    concurrency: int

    def adapters(self, names: Sequence[str]) -> list[str | None]:
        """Which adapter each request asks for."""
        if self.situation == "base":
            return [None] * self.concurrency
        if self.situation == "one adapter":
            return [names[0]] * self.concurrency
        return list(names[: self.concurrency])


@dataclass(frozen=True, slots=True)
class Request:
    """`adapter` None: the base model."""

    prompt_ids: tuple[int, ...]
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy output of one request, and when its first and last token were there, in ms since the batch was sent."""

    output_ids: tuple[int, ...]
    first_ms: float
    last_ms: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The answers of requests sent together."""

    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """All output tokens over the time from sending to the last one: prefill is included."""
        total = sum(len(answer.output_ids) for answer in self.answers)
        return 1000 * total / max(answer.last_ms for answer in self.answers)

    @property
    def ttft_ms(self) -> float:
        """Mean time to first token."""
        return sum(answer.first_ms for answer in self.answers) / len(self.answers)

    @property
    def tpot_ms(self) -> float:
        """Mean over requests of the time per output token after the first."""
        times = [(answer.last_ms - answer.first_ms) / (len(answer.output_ids) - 1) for answer in self.answers]
        return sum(times) / len(times)


def requests(case: Case, names: Sequence[str], prompt_tokens: int, vocab: int, seed: int) -> list[Request]:
    """Random prompts: no two share a beginning, so that no prefix cache helps."""
    rng = np.random.default_rng(seed)
    return [Request(tuple(rng.integers(2, vocab, prompt_tokens).tolist()), adapter) for adapter in case.adapters(names)]


def decode_weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Weights that every decode step reads once: all linear modules and the head, not the embedding table."""
    return (spec.num_parameters - spec.vocab_size * spec.hidden) * ITEMSIZE[dtype]
