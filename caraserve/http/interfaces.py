"""What the HTTP layer needs of the engine, as protocols: `loop.Engine` satisfies them, and so does the tests' fake."""

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.routing.cost import Tier
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter
from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.errors import NotFound
from caraserve.telemetry.metrics import SnapshotView


class StreamApi(Protocol):
    """Deltas of one request; the last one has `finish` set. Iteration never raises for a request that failed."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    def cancel(self) -> None:
        """Frees all that the request holds within one iteration. Idempotent."""


class TokenizerApi(Protocol):
    """Text to token ids and back; ids are valid in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Raises ContextLengthExceeded when there are more than `max_tokens`."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any],
        max_tokens: int | None = None,
    ) -> list[int]:
        """Raises InvalidRequest when the model has no chat template or the template refuses the messages, and
        ContextLengthExceeded when there are more than `max_tokens`."""


class AdapterView(Protocol):
    """An adapter as the API lists it."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def created_s(self) -> float: ...


class EngineApi(Protocol):
    """One base model and its adapters. `default_sampling` is the model's generation_config (temperature, top_p, …)."""

    @property
    def base_name(self) -> str: ...

    @property
    def base_names(self) -> Sequence[str]:
        """All names that the base model answers to, `base_name` first."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def default_sampling(self) -> Mapping[str, Any]: ...

    @property
    def tokenizer(self) -> TokenizerApi: ...

    @property
    def draining(self) -> bool: ...

    @property
    def failure(self) -> str | None:
        """Why nothing will ever be answered again; None: all is well."""

    def submit_each(self, requests: Sequence[GenerateRequest]) -> Generator[StreamApi]:
        """Queues a request with each step, all with the adapter version that the first one gets. A step raises
        NotFound, Overloaded, Draining or ContextLengthExceeded without any effect. Close it after the last step."""

    def adapters(self) -> Sequence[AdapterView]: ...

    def adapter(self, name: str) -> AdapterView:
        """Raises NotFound."""

    async def load_adapter(self, name: str, path: str, *, inplace: bool = False) -> AdapterView:
        """Raises AdapterRejected or NotFound."""

    async def unload_adapter(self, name: str) -> None:
        """Returns when no request uses the adapter any more. Raises NotFound."""

    def snapshot(self) -> SnapshotView: ...

    def waiting(self) -> Set[str]:
        """Ids of the requests that have not begun."""


class ClusterApi(Protocol):
    """The instances that serve together with this one; `cluster.Node` satisfies it."""

    @property
    def name(self) -> str: ...

    def members(self) -> tuple[MemberRecord, ...]:
        """Everybody known, this instance first."""

    def load(self, name: str) -> tuple[InstanceLoad, float] | None:
        """The newest load of an instance, and its age in seconds."""

    @property
    def registry_version(self) -> int:
        """Another number whenever names or what they mean have changed."""

    def adapters(self) -> Iterator[RegisteredAdapter]: ...

    def adapter(self, name: str) -> RegisteredAdapter | None: ...

    def holders(self, digest: str) -> Mapping[str, Tier]:
        """Who has an adapter's bytes."""

    def remove(self, name: str) -> None:
        """Takes an adapter's name away on all instances."""


Find = Callable[[str], str | None]
"""The adapter that a request's model means, None for the base. Raises NotFound with param `model`."""


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """An adapter that other instances have, as the API lists it."""

    name: str
    digest: str
    rank: int
    num_bytes: int
    created_s: float

    @property
    def path(self) -> str:
        """Of no file here."""
        return self.digest


class Served(Protocol):
    """What is served here: `Context` has it."""

    @property
    def engine(self) -> EngineApi: ...

    @property
    def cluster(self) -> ClusterApi | None: ...

    @property
    def started_s(self) -> float: ...


def find_adapter(served: Served, model: str) -> AdapterView | None:
    """The adapter that `model` names, here or in the cluster; None for the base. `base:adapter` is SGLang's way to say
    `adapter`.

    Raises NotFound with param `model`.
    """
    if model in served.engine.base_names:
        return None
    bases = [base for base in served.engine.base_names if model.startswith(f"{base}:")]
    for name in (model, *(model.removeprefix(f"{base}:") for base in bases)):
        try:
            return served.engine.adapter(name)
        except NotFound:
            if served.cluster is not None and (far := served.cluster.adapter(name)) is not None:
                return far_adapter(served, far)
    raise NotFound(f"The model {model[:200]!r} does not exist; GET /v1/models lists those that do.", param="model")


def named_adapter(served: Served, model: str) -> str | None:
    """The name alone of the adapter that `model` names; see `find_adapter`."""
    adapter = find_adapter(served, model)
    return None if adapter is None else adapter.name


def far_adapter(served: Served, adapter: RegisteredAdapter) -> RemoteAdapter:
    """A name that the cluster knows, with what is known of it."""
    return RemoteAdapter(adapter.name, adapter.digest, adapter.rank, adapter.num_bytes, served.started_s)
