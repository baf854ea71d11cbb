"""The requests and answers of both sides of `engine.py`. Imports neither torch nor the server."""

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
        """Returns the adapter of each request; None is the base model."""
        if self.situation == "base":
            return [None] * self.concurrency
        if self.situation == "one adapter":
            return [names[0]] * self.concurrency
        return list(names[: self.concurrency])


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its adapter; None is the base model."""

    prompt_ids: tuple[int, ...]
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy output of one request, and the times of its first and last token, in ms since the batch was sent."""

    output_ids: tuple[int, ...]
    first_ms: float
    last_ms: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The answers of requests sent together."""

    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """All output tokens over the time from sending to the last token, including prefill."""
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
    """Returns requests with random prompts; no two share a prefix, so that no prefix cache helps."""
    rng = np.random.default_rng(seed)
    return [Request(tuple(rng.integers(2, vocab, prompt_tokens).tolist()), adapter) for adapter in case.adapters(names)]


def decode_weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Returns the bytes of weights that a decode step reads: all linear modules and the head, not the embeddings."""
    return (spec.num_parameters - spec.vocab_size * spec.hidden) * ITEMSIZE[dtype]
