"""What passes between the parts of a benchmark: requests as planned, and as they went. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload. `at_s` counts from the workload's start; closed-loop clients ignore it."""

    index: int
    at_s: float
    adapter: int | None  # index into the run's adapters; None: the base model
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be sent, and to which adapters."""

    requests: tuple[PlannedRequest, ...]  # by `at_s`
    ranks: tuple[int, ...]  # of the adapters, by index
    notes: tuple[str, ...] = ()  # what was assumed or changed, a sentence each


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as it went; times count from the run's start.

    `token_s` has the arrival of each output token, where the server names the tokens of an event, else of each event.
    `error` is None for a complete answer. `phases` is what the server said of where the time went, in ms, where it did.
    """

    index: int
    model: str
    rank: int | None  # 0: the base model; None: an adapter whose rank nobody told
    due_s: float  # when the schedule wanted it sent
    sent_s: float
    done_s: float
    prompt_tokens: int
    output_tokens: int
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    token_s: tuple[float, ...] = ()
    error: str | None = None
    phases: tuple[tuple[str, float], ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        """From sending to the last byte."""
        return self.done_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Run:
    """A workload played once."""

    label: str  # what the reader calls it: a mode, a server, a rate
    records: tuple[RequestRecord, ...]  # by index; those never sent are not there
    wall_s: float
    interrupted: bool = False
    concurrency: int | None = None  # a closed loop: requests waited until so few were under way; None: an open one
