"""An engine on the fake backend of hashes, in which a test chooses the operation that ends next."""

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from caraserve.config import LAYERWISE_MODES, LOADING_MODES
from caraserve.core.backend import Limits, SharedMemory
from caraserve.core.lora_layout import aligned_bytes
from caraserve.core.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from caraserve.core.tenant import Tenant
from caraserve.cpu.shared_memory import Arena
from caraserve.engine.iteration_times import IterationTime
from caraserve.engine.merge_policy import MergePolicy
from caraserve.engine.token_stream import TokenStream
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.loop import Engine
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.catalog import Catalog, CatalogRules
from caraserve.lora.manager import AdapterManager
from caraserve.lora.registry import AdapterInfo, Registry
from caraserve.lora.start_policy import StartPolicy
from caraserve.util.units import align_up
from tests.fake_backend import FakeBackend, FakeTokenizer, SideBatch, expected, expected_embedding
from tests.fake_images import ADAPTER_BYTES, FakeReader

Way = TypeVar("Way")

CONTEXT, BLOCK_TOKENS = 48, 4
MAX_IDLE_TURNS = 50
_STREAMED_LAYERS = 4


class _Metrics:
    def __init__(self) -> None:
        self.preemptions = self.first_tokens = self.drafted = self.accepted = 0
        self.choices: list[tuple[str, float, float]] = []
        self.iterations_ms: list[float] = []
        self.begin_errors_s: list[float] = []
        self.waits_s: list[float] = []  # of the device, for each iteration

    def observe_choice(self, choice: str, predicted_ms: float, observed_ms: float) -> None:
        self.choices.append((choice, predicted_ms, observed_ms))

    def observe_preemption(self) -> None:
        self.preemptions += 1

    def observe_iteration(self, num_tokens: int, ms: float) -> None:
        self.iterations_ms.append(ms)

    def observe_begin(self, error_s: float, late_s: float) -> None:
        self.begin_errors_s.append(error_s)
        self.waits_s.append(late_s)

    def observe_first_token(self, seconds: float) -> None:
        self.first_tokens += 1

    def observe_drafts(self, drafts: int, accepted: int) -> None:
        self.drafted, self.accepted = self.drafted + drafts, self.accepted + accepted

    def observe_token_gaps(self, seconds: float, count: int) -> None: ...
    def observe_finish(self, finish: Finish) -> None: ...
    def observe_request(self, request: GenerateRequest, finish: Finish, first_token_s: float | None) -> None: ...


class _Costs:
    """The costs of a machine on which a prefill token takes 0.1 s."""

    def prefill_ms(self, tokens: int, rank: int) -> float:
        return 100.0 * tokens

    def cpu_lora_ms(self, tokens: int, rank: int, targets: str) -> float:
        return 10.0 * tokens


class _Catalog(Catalog):
    """A catalog that reads no disk: a folder's name is its adapter's digest."""

    def _resolve(self, path: str, roots: Sequence[Path]) -> Path:
        return Path(Path(path).name)

    def _inspect(self, name: str, folder: AdapterFolder) -> tuple[AdapterInfo, Sequence[str]]:
        return AdapterInfo(name, folder.name, folder.name, 8, ("q_proj",), ADAPTER_BYTES, 0.0), ()


def asked_for(
    prompt: Sequence[int], name: str | None, *, embeds: bool = False, client: str = "", **params: Any
) -> GenerateRequest:
    """Returns the request of `EngineHarness.ask`."""
    settings = SamplingParams(**{"temperature": 0.0} | params)
    return GenerateRequest("r", tuple(prompt), name, settings, 0.0, tenant=Tenant(client), embeds=embeds)


class FakeAlarm:
    """An alarm that a test rings."""

    def __init__(self, backend: FakeBackend) -> None:
        self.settings = 0  # how often it was set
        self._backend, self._call = backend, lambda: None
        self._at_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self._at_s is not None

    def set(self, at_s: float, call: Callable[[], None]) -> None:
        self.settings += 1
        self._at_s, self._call = at_s, call

    def ring(self) -> None:
        """Lets the time pass until then."""
        assert self._at_s is not None
        self._backend.now_s, self._at_s = max(self._backend.now_s, self._at_s), None
        self._call()


@dataclass
class SentRequest:
    """A request and its output."""

    prompt: tuple[int, ...]
    digest: str | None
    params: SamplingParams
    stream: TokenStream
    embeds: bool = False
    deltas: list[TokenDelta] = field(default_factory=list)
    rest: Callable[[], int] = lambda: 0  # returns the turns of the event loop before the next delta is read

    async def collect(self) -> "SentRequest":
        async for delta in self.stream:
            self.deltas.append(delta)
            for _ in range(self.rest()):
                await asyncio.sleep(0)
        return self

    @property
    def finish(self) -> Finish:
        assert self.deltas[-1].finish is not None
        return self.deltas[-1].finish

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    def check(self, *, is_wrong: bool = False) -> None:
        """Checks the tokens: a request that was cancelled or failed must have a prefix of the right ones, unless its
        adapter may have been wrong (`is_wrong`). Checks the embedding, if it embeds its prompt and has not failed."""
        if is_wrong and self.finish.reason in ("cancelled", "error"):
            return
        if self.embeds:
            has_ended = self.finish.reason == "stop"
            embedding = expected_embedding(self.prompt, self.digest) if has_ended else None
            assert (self.tokens, self.deltas[-1].embedding) == ([], embedding)
            assert has_ended or self.finish.reason in ("cancelled", "error")
            return
        right = expected(self.prompt, self.digest, min(self.params.max_tokens, CONTEXT - len(self.prompt)))
        assert self.tokens == right[: len(self.tokens)]
        if self.finish.reason == "length":
            assert self.tokens == right


@dataclass(repr=False)  # asyncio.run formats the result of its task: 10 ms for one with all its requests
class EngineHarness:
    """An engine on a fake backend, in which a test chooses the operation that ends next."""

    engine: Engine
    backend: FakeBackend
    reader: FakeReader
    metrics: _Metrics
    rng: random.Random
    alarm: FakeAlarm
    read_failures: float = 0.0
    plan_failures: float = 0.0
    copy_failures: float = 0.0
    side_batch_failures: float = 0.0  # probability that a side batch needs a retry, or fails
    streams: bool = False  # whether adapters are downloaded layer by layer
    most_rests: int = 0  # of a reader before its next delta, in turns of the event loop

    def ask(
        self,
        prompt: Sequence[int],
        name: str | None,
        *,
        embeds: bool = False,
        client: str = "",
        predicted: Sequence[int] = (),
        **params: Any,
    ) -> tuple[SentRequest, "asyncio.Task[SentRequest]"]:
        request = asked_for(prompt, name, embeds=embeds, client=client, **params)
        request = replace(request, predicted_ids=tuple(predicted))
        digest = None if name is None else self.engine.adapter(name).digest
        asked = SentRequest(tuple(prompt), digest, request.params, self.engine.submit(request), embeds)
        if self.most_rests:
            asked.rest = functools.partial(self.rng.randrange, self.most_rests + 1)
        return asked, asyncio.create_task(asked.collect())

    def end_something(self) -> bool:
        """Ends one read, copy, iteration, side batch, growth of the KV pool or wait for the time to plan. Returns False
        if there is none."""
        self.engine.check()
        backend = self.backend
        ways = [
            (queue, end)
            for queue, end in (
                (backend.lane, self._end_iteration),
                (self._ending_reads(), lambda: self._any(self.reader.reads)(self.rng.random() >= self.read_failures)),
                (backend.copies, lambda: self._any(backend.copies)(self.rng.random() >= self.copy_failures)),
                (backend.resizes, lambda: self._any(backend.resizes)()),
                (self.reader.coming if self.streams else [], lambda: self.rng.choice(self.reader.coming)()),
                (backend.streamed if self.copy_failures else {}, self._fail_streamed),
                (self._ending_side_batches(), self._end_side_batch),
                (self.alarm.is_set, self.alarm.ring),
            )
            if queue
        ]
        if self.reader.checks and (not ways or self.rng.random() < 0.05):  # late: many requests have ended but for it
            self._any(self.reader.checks)()
            return True
        if not ways:
            return False
        self.rng.choice(ways)[1]()
        return True

    def _end_iteration(self) -> None:
        self.backend.fail_next = self.rng.random() < self.plan_failures
        self.backend.step()
        self.backend.fail_next = False

    def _ending_reads(self) -> list[Callable[[bool], None]]:
        """Returns the reads that may end: nine times in ten none while one of them has layers to deliver."""
        return [] if self.streams and self.reader.coming and self.rng.random() < 0.9 else self.reader.reads

    def _fail_streamed(self) -> None:
        if self.rng.random() < self.copy_failures:
            self.backend.fail_streamed(self.rng.choice(list(self.backend.streamed)))

    def _ending_side_batches(self) -> list[SideBatch]:
        return [side_batch for side_batch in self.backend.side_batches if self.backend.may_end(side_batch)]

    def _end_side_batch(self) -> None:
        failed = self.rng.random() < self.side_batch_failures
        ending = self.rng.choice(self._ending_side_batches())
        leaves = ending.streamed is None and ending.row.count > 1 and self.rng.random() < 0.3
        outcome = self.rng.choice(("void", "failed")) if failed else "left" if leaves else "done"
        self.backend.end_side_batch(self.backend.side_batches.index(ending), outcome)

    def _any(self, queue: list[Way]) -> Way:
        return queue.pop(self.rng.randrange(len(queue)))

    async def until_done(self, tasks: "Sequence[asyncio.Task[SentRequest]]") -> None:
        idle = 0
        while not all(task.done() for task in tasks):
            for _ in range(self.rng.randrange(1, 6)):
                await asyncio.sleep(0)
            idle = 0 if self.end_something() else idle + 1
            assert idle < MAX_IDLE_TURNS, "nothing is under way, and yet requests wait"

    async def settle(self) -> None:
        """Ends all operations under way."""
        for _ in range(MAX_IDLE_TURNS):
            await asyncio.sleep(0)
            while self.end_something():  # noqa: ASYNC110
                await asyncio.sleep(0)


def shared_memory(spare_bytes: int, blocks: int, adapters: int) -> SharedMemory:
    """Returns shared memory for at least one adapter and the KV blocks of one request."""
    least = CONTEXT // BLOCK_TOKENS
    sizes = {"block_bytes": 30, "granule_bytes": 40, "least_blocks": least}
    one_each = align_up(least * 30, 40) + align_up(ADAPTER_BYTES, 40)
    at_start = align_up(blocks * 30, 40)
    return SharedMemory(max(one_each, at_start) + spare_bytes, adapter_bytes=adapters * 120 + 30, **sizes)


@contextlib.asynccontextmanager
async def harness(
    rng: random.Random,
    *,
    adapters: int = 4,
    device_adapters: int = 2,
    blocks: int = 14,
    step_tokens: int = 16,
    slots: int = 5,
    exclusive: bool = False,
    keep_on_device: bool = False,
    mode: str = "overlapped",
    spare_bytes: int | None = None,
    assisted_batches: int = 0,
    streamed_batches: int = 0,
    state_bytes: int = 0,
    clock_step_s: float = 0.0,
    iteration_ms: IterationTime | None = None,
    draft_tokens: int = 0,
    just_in_time: bool = False,
) -> AsyncIterator[EngineHarness]:
    """Builds one. `spare_bytes`: memory beyond `blocks` blocks and the largest adapter, where they share it.
    `streamed_batches`: if above 0, adapters have several layers, which are downloaded one by one. `clock_step_s`: time
    that passes with each reading of the engine's clock. `iteration_ms`: the engine's performance model.
    `just_in_time`: whether the engine has an alarm, and so may plan iterations later than as soon as possible."""
    limits = Limits(
        num_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        num_slots=slots,
        adapter_slots=device_adapters + 2,
        max_step_tokens=step_tokens,
        max_context=CONTEXT,
        embedding_size=1,
        shared=None if spare_bytes is None else shared_memory(spare_bytes, blocks, device_adapters),
        assisted_batches=assisted_batches,
        streamed_batches=streamed_batches,
        state_bytes=state_bytes,
        draft_tokens=draft_tokens,
    )
    backend = FakeBackend(limits, layerwise=mode in LAYERWISE_MODES)
    alarm = FakeAlarm(backend)
    layers = _STREAMED_LAYERS if streamed_batches else 1
    reader, metrics = FakeReader(layers), _Metrics()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: backend.faults.append(repr(context)))
    room, arena = MemoryBudget(limits, device_adapters * ADAPTER_BYTES), Arena(aligned_bytes(4 * ADAPTER_BYTES))
    manager = AdapterManager(
        backend,
        room,
        arena,
        reader.read,
        lambda call: loop.call_soon(call) and None,
        lambda: backend.now_s,
        StartPolicy(LOADING_MODES[mode], layers=layers, link_bytes_per_s=ADAPTER_BYTES / 3, costs=_Costs(), workers=1),
        check=reader.check,
    )
    registry = Registry(None)
    rules = CatalogRules("base", (), room.most_adapter_bytes, arena.num_bytes, keep_on_device)
    catalog = _Catalog(None, registry, manager, reader, rules)  # type: ignore[arg-type]
    catalog.add_at_start([(f"a{index}", Path(f"digest-{index}")) for index in range(adapters)], lambda: None)
    settings = {"max_queue": 10_000, "seed": 0, "enable_prefix_caching": True, "max_unread_bytes": None}
    config = type("Config", (), settings | {"num_speculative_tokens": draft_tokens})

    def now() -> float:
        backend.now_s += clock_step_s
        return backend.now_s

    engine = Engine(
        base_names=("base",),
        backend=backend,
        catalog=catalog,
        tokenizer=FakeTokenizer(),  # type: ignore[arg-type]
        config=config,  # type: ignore[arg-type]
        metrics=metrics,
        exclusive_loads=exclusive,
        merging=MergePolicy(slots, credits_each=2.0) if mode == "merged" else None,  # so few credits are soon used up
        iteration_ms=iteration_ms,
        alarm=alarm if just_in_time else None,  # type: ignore[arg-type]
        now=now,
    )
    running = asyncio.create_task(engine.run())
    try:
        yield EngineHarness(engine, backend, reader, metrics, rng, alarm, streams=streamed_batches > 0)
        engine.check()
        snapshot = engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.kv_used_blocks) == (0, 0, 0)
        assert engine.unread.held_bytes == 0
        assert backend.faults == []
        if running.done():
            await running
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        reader.close()
        registry.close()


@contextlib.asynccontextmanager
async def in_harness(**kind: Any) -> AsyncIterator[EngineHarness]:
    """Yields a harness for one test, and ends all operations that the test left under way."""
    async with harness(random.Random(0), **kind) as here:
        yield here
        await here.settle()


async def turn() -> None:
    """Runs the event loop until the engine has done all it can before an operation ends."""
    for _ in range(10):
        await asyncio.sleep(0)
