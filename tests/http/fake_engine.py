"""A fake engine whose deltas the test chooses, with the methods of the engine that the HTTP server uses."""

import asyncio
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from caraserve.core.adapter_facts import NO_FACTS, AdapterFacts
from caraserve.core.reasoning_grammar import ReasoningTokens
from caraserve.core.request import Finish, FinishReason, GenerateRequest, Phases, TokenDelta, TokenLogprob
from caraserve.core.score_head import ScoreHead
from caraserve.core.tenant import Tenant
from caraserve.engine.batch_timeline import BatchTimeline
from caraserve.engine.stats import RequestCounts
from caraserve.engine.unread import UnreadAnswer, UnreadBudget
from caraserve.errors import CaraServeError, ContextLengthExceeded, InvalidRequest, NotFound
from caraserve.lora.adapter import Adapter, EndedLoad
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.served_base import ANY_BASE
from caraserve.model.sentence_format import LAST_TOKEN
from caraserve.tokenizer.adapter_templates import AdapterTemplates
from caraserve.tokenizer.grammar import GrammarSource
from caraserve.tokenizer.reasoning import ReasoningFormat
from caraserve.tokenizer.tokenizer import InfillFormat
from caraserve.tokenizer.tool_format import HERMES, ToolFormat

PHASES = Phases(queued_ms=1.0, load_ms=2.0, prefill_ms=3.0, decode_ms=4.0)
BOS, EOS = 256, 257
EMBEDDING_SIZE = 4
WRONG_GRAMMAR = "(wrong"
DIGEST = "d" * 64  # of every adapter


class FakeGrammar(GrammarSource):
    """A source in place of its grammar. It counts as wrong if its text has `WRONG_GRAMMAR`."""

    async def prepare(self, tenant: Tenant) -> None:
        if WRONG_GRAMMAR in self.text:
            raise InvalidRequest(f"{self.field} cannot be compiled: it is wrong", param=self.field)


class FakeGrammars:
    """A compiler that returns sources as they are."""

    def uncompiled(self, source: GrammarSource) -> FakeGrammar:
        return FakeGrammar(source.kind, source.text, source.field)


class FakeTokenizer:
    """A tokenizer with a token for each UTF-8 byte; token 256 begins a text and 257 ends it."""

    vocab_size = 258
    eos_ids = frozenset({EOS})
    pad_id: int | None = EOS
    can_chat = True
    sentences = LAST_TOKEN
    special_ids = frozenset({BOS, EOS})
    info: Mapping[str, Any] = {"tokenizer_class": "Bytes", "eos_token": "</s>"}
    grammars = FakeGrammars()
    tool_format: ToolFormat | None = HERMES
    renders_tools = True
    excludes_unused_tools = False
    reasoning_format: ReasoningFormat | None = None
    infill_format: InfillFormat | None = InfillFormat("<P>", "<S>", "<M>")

    @functools.cached_property
    def adapter_templates(self) -> AdapterTemplates:
        return AdapterTemplates({"bos_token": "<s>"}, None, ReasoningTokens(1, (2,)))

    def encode_chat(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens, source="messages")

    def special_id(self, text: str) -> int | None:
        return None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None, source: str = "prompt"
    ) -> list[int]:
        ids = [BOS] * add_special_tokens + list(text.encode())
        if max_tokens is not None and len(ids) > max_tokens:
            raise ContextLengthExceeded(f"This model's maximum context length is {max_tokens} tokens.", param=source)
        return ids

    def encode_pair(self, first: str, second: str, *, add_special_tokens: bool, max_tokens: int) -> list[int]:
        ids = self.encode(first, add_special_tokens=add_special_tokens)
        return [*ids, EOS, *self.encode(second, add_special_tokens=False, max_tokens=max_tokens)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")
        return text if skip_special_tokens else "".join(["<s>" for token_id in ids if token_id == BOS]) + text

    def token_text(self, token_id: int) -> str:
        return {BOS: "<s>", EOS: "</s>"}.get(token_id) or chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        if kwargs.get("broken"):
            raise InvalidRequest("messages[1] has tool_calls, which the template cannot render.", param="messages")
        text = "".join(f"tool:{tool['function']['name']};" for tool in tools or ())
        text += "".join(f"{message['role']}:{message['content']};" for message in messages)
        return self.encode(text + "assistant:" * add_generation_prompt, max_tokens=max_tokens, source="messages")


@dataclass(frozen=True)
class FakeAdapter:
    name: str
    path: str
    rank: int = 8
    num_bytes: int = 1024
    created_s: float = 1_700_000_000.5
    digest: str = DIGEST
    targets: tuple[str, ...] = ("q_proj",)
    facts: AdapterFacts = NO_FACTS
    state: str = "active"


@dataclass(frozen=True)
class FakeSnapshot:
    running: int = 2
    waiting: int = 1
    kv_used_blocks: int = 25
    kv_total_blocks: int = 100
    running_adapters: tuple[str, ...] = ("b", "a")
    waiting_adapters: tuple[str, ...] = ()
    num_on_device: int = 2
    num_in_host: int = 1
    loads_under_way: int = 0
    device_adapters: frozenset[str] = frozenset({"a", "b"})
    host_adapters: tuple[str, ...] = ("a",)
    draining: bool = False


def finish(
    request: GenerateRequest,
    completion_tokens: int,
    reason: FinishReason = "stop",
    stop_reason: str | int | None = None,
    error: CaraServeError | None = None,
    head: ScoreHead | None = None,
) -> Finish:
    served_by = "org/base" if request.adapter is None else f"{request.adapter}@{DIGEST}"
    return Finish(reason, len(request.prompt_ids), completion_tokens, 0, PHASES, stop_reason, error, served_by, head)


def embedding_of(ids: Sequence[int]) -> bytes:
    """Returns the embedding of a prompt: its last token ids, with zeros before them."""
    return np.array([*[0] * EMBEDDING_SIZE, *ids], np.float32)[-EMBEDDING_SIZE:].tobytes()


def spell(request: GenerateRequest, text: str = "Hi!") -> list[TokenDelta]:
    """Returns the engine's default deltas: `text` byte by byte, with logprobs if requested; or an embedding."""
    params = request.params
    if request.embeds:
        return [TokenDelta("", (), finish=finish(request, 0), embedding=embedding_of(request.prompt_ids))]
    prompt_scores: tuple[TokenLogprob | None, ...] = ()
    if params.prompt_logprobs is not None:
        prompt_scores = (None, *[scored(token_id, params.prompt_logprobs) for token_id in request.prompt_ids[1:]])
    ids = list(text.encode())[: params.max_tokens]
    deltas = [
        TokenDelta(
            chr(token_id), (token_id,), (scored(token_id, params.logprobs),) if params.logprobs is not None else ()
        )
        for token_id in ids
    ]
    last = TokenDelta("", (), finish=finish(request, len(ids), "length" if len(ids) == params.max_tokens else "stop"))
    deltas.append(last)
    if prompt_scores:
        first = deltas[0]
        deltas[0] = TokenDelta(first.text, first.token_ids, first.logprobs, prompt_scores, first.finish)
    return deltas


def failing(error: CaraServeError, text: str = "") -> Callable[[GenerateRequest], list[TokenDelta]]:
    """Returns a script of answers that are `text`, if any, and then end with an error."""

    def script(request: GenerateRequest) -> list[TokenDelta]:
        deltas = [TokenDelta(text, (1,))] if text else []
        return [*deltas, TokenDelta("", (), finish=finish(request, len(deltas), "error", error=error))]

    return script


def scored(token_id: int, alternatives: int) -> TokenLogprob:
    """Returns logprobs in which the token itself is the best, the next ids follow, and the last has probability 0."""
    top_logprobs = [-0.5 - place for place in range(alternatives)]
    if alternatives > 2:
        top_logprobs[-1] = float("-inf")
    top_ids = [(token_id + place) % 256 for place in range(alternatives)]
    return TokenLogprob(token_id, -0.5, tuple(top_ids), tuple(top_logprobs), rank=1)


class FakeStream:
    """A queue of deltas; `feed` adds to it. Counts its cancellations."""

    def __init__(self, request: GenerateRequest, digest: str = DIGEST) -> None:
        """`digest`: of the request's adapter."""
        self.request, self._digest = request, digest
        self.unread = UnreadAnswer(UnreadBudget(1 << 30, lambda: None), "client")
        self.cancelled = asyncio.Event()
        self.cancels = 0
        self.reached = PHASES
        self.taken = 0
        self.num_computed: Callable[[], int] = int
        self.write: Callable[[str, int], bool] | None = None
        self._deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._ended = False

    def write_with(self, write: Callable[[str, int], bool]) -> None:
        """Passes nothing to `write`, which tests may call: the reader gets all that is fed."""
        self.write = write

    def served_by(self) -> str:
        return "org/base" if self.request.adapter is None else f"{self.request.adapter}@{self._digest}"

    def phases(self) -> Phases:
        return self.reached

    def feed(self, *deltas: TokenDelta) -> None:
        for delta in deltas:
            self._deltas.put_nowait(delta)

    def end(
        self, completion_tokens: int = 1, reason: FinishReason = "stop", error: CaraServeError | None = None
    ) -> None:
        self.feed(TokenDelta("", (), finish=finish(self.request, completion_tokens, reason, error=error)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._ended:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self.taken += 1
        self._ended = delta.finish is not None
        return delta

    def cancel(self) -> None:
        self.cancels += 1
        if not self._ended:
            self.cancelled.set()


class FakeCatalog:
    """A fake catalog and its manager: `adapters` are the records by digest."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.ended_loads: list[EndedLoad] = []
        self.manager, self.rules = self, SimpleNamespace(base=ANY_BASE)

    def find(self, digest: str) -> Adapter | None:
        return self.adapters.get(digest)

    def refuse_combination(self, info: AdapterInfo) -> None: ...


@dataclass
class FakeEngine:
    """A fake engine. `script` gives a request's deltas; None leaves them to the test. Submit i raises `refusals[i]`."""

    script: Callable[[GenerateRequest], Iterable[TokenDelta]] | None = spell
    base_name: str = "org/base"
    other_base_names: tuple[str, ...] = ()
    max_model_len: int = 1000
    embedding_size: int = EMBEDDING_SIZE
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    draining: bool = False
    failure: str | None = None
    refusals: dict[int, Exception] = field(default_factory=dict)
    shown: FakeSnapshot = field(default_factory=FakeSnapshot)
    timeline: BatchTimeline = field(default_factory=BatchTimeline)
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    catalog: Any = field(default_factory=FakeCatalog)
    loaded: dict[str, FakeAdapter] = field(default_factory=lambda: {n: FakeAdapter(n, f"/adapters/{n}") for n in "ab"})
    streams: list[FakeStream] = field(default_factory=list)
    admin_gate: asyncio.Event | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def base_names(self) -> tuple[str, ...]:
        return (self.base_name, *self.other_base_names)

    @property
    def requests(self) -> list[GenerateRequest]:
        return [stream.request for stream in self.streams]

    def submit(self, request: GenerateRequest) -> FakeStream:
        if len(self.streams) in self.refusals:
            raise self.refusals[len(self.streams)]
        loaded = None if request.adapter is None else self.loaded.get(request.adapter)
        stream = FakeStream(request, DIGEST if loaded is None else loaded.digest)
        self.streams.append(stream)
        if self.script is not None:
            stream.feed(*self.script(request))
        self.changed.set()
        return stream

    def submit_each(self, requests: Sequence[GenerateRequest]) -> Generator[FakeStream]:
        for request in requests:
            yield self.submit(request)

    async def submitted(self, count: int = 1) -> list[FakeStream]:
        while len(self.streams) < count:
            self.changed.clear()
            await self.changed.wait()
        return self.streams

    def adapters(self) -> list[FakeAdapter]:
        return list(self.loaded.values())

    def adapter(self, name: str) -> FakeAdapter:
        if name not in self.loaded:
            raise NotFound(f"no adapter {name!r}")
        return self.loaded[name]

    async def load_adapter(
        self, name: str, path: str, *, inplace: bool = False, check: Callable[[], None] = lambda: None
    ) -> FakeAdapter:
        check()
        if self.admin_gate is not None:
            self.changed.set()
            await self.admin_gate.wait()
        if path == "missing":
            raise NotFound(f"no folder {path!r}")
        self.loaded[name] = FakeAdapter(name, path)
        self.changed.set()
        return self.loaded[name]

    async def unload_adapter(self, name: str) -> None:
        del self.loaded[self.adapter(name).name]

    def waiting(self) -> set[str]:
        return {stream.request.request_id for stream in self.streams if not stream.taken}

    def predicted_answer_s(self) -> float:
        return 8.0

    def predicted_wait_s(self) -> float:
        return 12.0

    def snapshot(self) -> FakeSnapshot:
        return self.shown
