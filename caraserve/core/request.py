"""The data of a request: its input, the engine's record of it, and the token deltas of its output.

The HTTP layer makes a `GenerateRequest`. The engine makes a `Request` of it, which only `engine/active_request.py`
changes. `TokenDelta`s are sent through a `TokenStream`. Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from caraserve.core.tenant import NO_TENANT, Tenant

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caraserve.core.grammar import Grammar
    from caraserve.core.score_head import ScoreHead
    from caraserve.errors import CaraServeError

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20  # alternatives to a token of an answer
MAX_PROMPT_LOGPROBS = 100  # alternatives to a token of a prompt
MAX_STOPS = 16
MAX_LOGIT_BIAS = 300


class SamplingRange(NamedTuple):
    """The values of a sampling parameter: [low, high], or (low, high] where `above_low`."""

    low: int
    high: int
    above_low: bool = False


# Of the parameters that a model may have defaults for.
SAMPLING_RANGES = {
    "temperature": SamplingRange(0, 100),
    "top_p": SamplingRange(0, 1, above_low=True),
    "top_k": SamplingRange(-1, 1 << 31),
    "min_p": SamplingRange(0, 1),
    "repetition_penalty": SamplingRange(0, 100, above_low=True),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated parameters by which tokens are chosen and generation ends.

    `top_k` 0 means off. `logprobs` None means none, 0 the chosen token only, n also the n best alternatives.
    `prompt_logprobs` likewise for every prompt token but the first. `seed` None: the engine draws one. `grammar`: the
    answer follows it, and ends where it is complete.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    kept_special_ids: frozenset[int] = frozenset()  # of tokens that are text even if special tokens are skipped
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: "Grammar | None" = None


def with_params(params: SamplingParams, **values: Any) -> SamplingParams:
    """Returns parameters with other values; the same object if all are as they were, since a copy takes 6 µs."""
    changed = {name: value for name, value in values.items() if getattr(params, name) != value}
    return replace(params, **changed) if changed else params


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Vectors that stand in a prompt in place of tokens: vector i is token -1 - i of `GenerateRequest.prompt_ids`."""

    values: "NDArray[np.float32]" = field(compare=False)  # [vectors, hidden]
    digests: tuple[bytes, ...]  # of each vector

    def digests_in(self, tokens: Sequence[int]) -> bytes:
        """Returns the digests of the vectors among `tokens`, in order."""
        return b"".join(self.digests[-1 - token] for token in tokens if token < 0)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt for one adapter (None: the base model). Within a tenant, requests of lower `priority` are served
    first.

    `embeds`: the result is the embedding of the prompt, and no token is generated; `params.max_tokens` is 0. It is the
    hidden state of the last token or, with `averages`, the mean of those of all tokens.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    adapter: str | None
    params: SamplingParams
    arrival_s: float
    tenant: Tenant = NO_TENANT
    cache_salt: str = ""
    priority: int = 0
    embeds: bool = False
    averages: bool = False
    counts_prompt: bool = True  # False: another answer to the same prompt counts the prompt's tokens
    prompt_embeds: PromptEmbeds | None = None
    predicted_ids: tuple[int, ...] = ()  # that the client expects in the answer; they change no token


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability in the unmodified distribution, and the best alternatives, best
    first. `rank`: of a prompt's token, 1 for the best one; of several that are as good, the one with the least id is
    better.

    Two tuples of numbers instead of one of pairs: with 20 alternatives the garbage collector has 3 objects to visit
    instead of 22.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


class PhaseTime(NamedTuple):
    """A stretch of a request's time in one phase, by the engine's clock. A preempted request is queued again."""

    name: str  # queued, load, prefill or decode
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Phases:
    """The time of a request by phase, in milliseconds; the parts add up to `e2e_ms` by construction.

    Two parts of prefill and decode are cold starts: in `stalled_ms` iterations waited for weights of the request's
    adapter, in `interrupted_ms` the request waited for loads of other adapters. `cpu_layers` counts the layers, over
    all its iterations, whose LoRA was computed by CPU workers, for which they spent `cpu_lora_ms`, added over workers.
    """

    queued_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    stalled_ms: float = 0.0
    interrupted_ms: float = 0.0
    cpu_layers: int = 0
    cpu_lora_ms: float = 0.0
    loading_choice: str = ""  # how mode `auto` started the request
    history: tuple[PhaseTime, ...] = ()

    @property
    def e2e_ms(self) -> float:
        return self.queued_ms + self.load_ms + self.prefill_ms + self.decode_ms


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended. `error` is set only when the reason is `error`."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    phases: Phases
    stop_reason: str | int | None = None
    error: "CaraServeError | None" = None
    served_by: str = ""  # `adapter@digest`, or the base model's name
    head: "ScoreHead | None" = None  # of the adapter that has answered


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The output of a request since the previous delta.

    `text` never splits a UTF-8 character and never holds text that may still become a stop string, so it can
    lag behind `token_ids`; the delta with `finish` set is the last and flushes it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token id when asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # of the prompt, in order, over one or more deltas
    finish: Finish | None = None
    embedding: bytes | None = None  # float32 [hidden]; in the only delta of a request that embeds its prompt


class Phase(Enum):
    """The phase of a request. LOADING: admitted, but its adapter is not on the device yet."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_PHASE_NAMES = {
    Phase.WAITING: "queued",
    Phase.PREEMPTED: "queued",
    Phase.LOADING: "load",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
}
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.LOADING, Phase.PREFILL, Phase.FINISHED}),
    Phase.LOADING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.PREEMPTED, Phase.FINISHED}),
    Phase.DECODE: frozenset({Phase.PREEMPTED, Phase.FINISHED}),
    Phase.PREEMPTED: frozenset({Phase.LOADING, Phase.PREFILL, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request; identity is the object. Only `ActiveRequest` writes it.

    Tokens are `prompt ‖ output`; positions [0, computed) have KV, or will when the launched batches have run.
    """

    inputs: GenerateRequest
    seed: int
    prompt_tokens: int = field(init=False)  # a field, as the scheduler reads it 9 times per row and iteration
    phase: Phase = Phase.WAITING
    since_s: float = 0.0  # start of the current phase
    history: list[PhaseTime] = field(default_factory=list)  # of the phases before
    output_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # positions whose KV is written by launched iterations
    base_tokens: int = 0  # first positions that the base model computes, before an activated LoRA
    launched_outputs: int = 0  # output tokens sampled by launched iterations, also those not processed yet
    cached_tokens: int = 0
    cpu_layers: int = 0
    cpu_lora_ms: float = 0.0
    stalled_ms: float = 0.0
    interrupted_ms: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.inputs.prompt_ids)

    def move_to(self, phase: Phase, now_s: float) -> None:
        """Moves to `phase`, and adds the time since the last move to the phase before. Raises AssertionError for a move
        that is not in `TRANSITIONS`."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.inputs.request_id}: {self.phase.name} cannot become {phase.name}")
        self.history.append(PhaseTime(_PHASE_NAMES[self.phase], self.since_s, now_s))
        self.phase, self.since_s = phase, now_s

    def ended_by(self, token: int, eos_ids: frozenset[int]) -> tuple[FinishReason | None, str | int | None]:
        """Returns the finish and stop reasons if `token` ends the request. The model's end token has no stop reason."""
        if token in self.inputs.params.stop_token_ids:
            return "stop", token
        if token in eos_ids and not self.inputs.params.ignore_eos:
            return "stop", None
        return None, None

    def wants_more(self, max_tokens: int) -> bool:
        """Returns whether another token may follow; `max_tokens` limits prompt and output together."""
        tokens = len(self.output_ids)
        return tokens < self.inputs.params.max_tokens and self.prompt_tokens + tokens < max_tokens

    def phases(self, now_s: float, loading_choice: str = "") -> Phases:
        """Returns the times until now, or until the end; waiting after a preemption counts as queued."""
        history = tuple(self.history)
        if self.phase is not Phase.FINISHED:
            history += (PhaseTime(_PHASE_NAMES[self.phase], self.since_s, now_s),)
        spent_s = dict.fromkeys(_PHASE_NAMES.values(), 0.0)
        for name, began_s, ended_s in history:
            spent_s[name] += ended_s - began_s
        return Phases(
            queued_ms=1000 * spent_s["queued"],
            load_ms=1000 * spent_s["load"],
            prefill_ms=1000 * spent_s["prefill"],
            decode_ms=1000 * spent_s["decode"],
            stalled_ms=self.stalled_ms,
            interrupted_ms=self.interrupted_ms,
            cpu_layers=self.cpu_layers,
            cpu_lora_ms=self.cpu_lora_ms,
            loading_choice=loading_choice,
            history=history,
        )
