"""Prefills that CPU workers help with, beside iterations: chunk by chunk on the assist lane (Toppings §4.2).

Before a chunk is launched, a letter for each layer and group that may have to be handed off says what each worker is
to do; whether it is sent, the device decides when it gets there. A chunk whose workers fail is void as a whole, and so
is the rest of its prompt: the engine does it again without help. Chunks of one prompt follow one another; chunks of
several may be under way, as many as there are books.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np
import torch

from caraserve.core.batch import Batch, RowResult, ScheduledRow, StepResult
from caraserve.core.lora_layout import GROUPS
from caraserve.core.outputs import Output, OutputValues, collect, outputs_of
from caraserve.cpu.lora_workers.pool import Workers
from caraserve.gpu.assist.handshake import Book, Books, Life
from caraserve.gpu.assist.order_writer import LetterWriter
from caraserve.gpu.assist.watchdog import Guard, lives_of
from caraserve.gpu.assist.work_orders import letter_bytes
from caraserve.gpu.driver.api import DriverError, Stream
from caraserve.gpu.driver.streams import NOTHING, Lane, at, latest
from caraserve.gpu.forward.batch import Shape
from caraserve.gpu.forward.channels import Channels, LaneParts
from caraserve.gpu.forward.iteration import Done, copy_results
from caraserve.gpu.forward.lanes import ASSISTED_CHUNK_TOKENS, AssistedChunk, AssistLane, chunk_ends
from caraserve.gpu.forward.lora_pass import AssistTerms
from caraserve.gpu.memory.adapters import Bound, DeviceImages, HostMemory
from caraserve.gpu.memory.host_memory import HandOffRoom, HostRegion, RegionWords, x_stride
from caraserve.gpu.memory.link_queue import Source, source
from caraserve.gpu.memory.slots import RequestSlots
from caraserve.model.spec import ModelSpec

_UNKNOWN_S = 0.002  # what a hand-off may be expected to take where nothing was measured


@dataclass(slots=True)
class Predictions:
    """What is expected of this machine; set when it is known. Only how well it goes depends on them."""

    layer_s: Callable[[int], float] = lambda tokens: 0.0  # to compute a layer of a prefill of so many tokens
    hand_off_s: Callable[[int, int], float] = lambda tokens, rank: _UNKNOWN_S  # of one group of one layer, at a rank
    tokens_per_worker: Callable[[int], int] = lambda rank: 64  # most of a slice


@dataclass(frozen=True, slots=True)
class Helpers:
    """The CPU workers, what they share with the device, and who sees to it that nobody waits for them in vain."""

    region: HostRegion
    memory: HostMemory
    workers: Workers
    guard: Guard


@dataclass(slots=True)
class Counts:
    """Since the start."""

    slices: int = 0  # asked of workers
    void_chunks: int = 0


@dataclass(slots=True, eq=False)
class _Prompt:
    """One plan that went aside."""

    plan: Batch
    done: Done
    issued: int  # mark of the compute lane, after which the device knows its slot and its blocks
    ends: deque[int]
    at: int  # where its next chunk begins
    started_s: float
    cpu_layers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Issuing:
    """A chunk on its way to the device's queue; `layers` issues one more at each step."""

    prompt: _Prompt
    book: Book
    layers: Iterator[None]


@dataclass(frozen=True, slots=True)
class _Chunk:
    prompt: _Prompt
    row: ScheduledRow
    outputs: Output
    book: Book
    number: int


class Asides:
    """The launching thread's alone."""

    def __init__(
        self,
        channels: Channels,
        parts: LaneParts,
        images: DeviceImages,
        slots: RequestSlots,
        helpers: Helpers,
        spec: ModelSpec,
        wake: Callable[[], None],
    ) -> None:
        """`wake` has the launching thread call `go_on`."""
        self._driver, self._timelines, self._ring = channels.driver, channels.timelines, channels.ring
        self._copier, self._queue = channels.copier, channels.queue
        self._images, self._slots, self._spec, self._wake = images, slots, spec, wake
        self._batch, self._host, self._results, self._waiter = parts.batch, parts.host, parts.results, parts.waiter
        self._decoder = parts.decoder
        self._region, self._memory = helpers.region, helpers.memory
        self._workers, self._guard = helpers.workers, helpers.guard
        self._lane = AssistLane(self._driver, self._timelines, self._copier, self._memory.device_base)
        region, workers, batch, host = self._region, self._workers, self._batch, self._host
        entries = spec.layers * len(GROUPS)
        self._words = RegionWords(region.region)
        self._rooms = {room.book: room for room in region.rooms}
        self._books = Books(self._words, [Book.at(room.book, entries) for room in region.rooms])
        device = batch.words.device
        self._letter_words = letter_bytes(max(1, len(workers))) // 8
        self._letters = torch.zeros((entries, self._letter_words), dtype=torch.int64, device=device)
        self._gate = torch.zeros(images.tables.slots, dtype=torch.int32, device=device)
        self._asked = torch.zeros(max(1, len(workers)), dtype=torch.int64, device=device)
        self._flags = torch.zeros(2, dtype=torch.int32, device=device)  # publish's counter, errors
        self._batch_words = host.empty()
        self._writer = LetterWriter(spec, region, self._memory)
        self._waiting: deque[_Prompt] = deque()
        self._issuing: _Issuing | None = None
        self._under_way: list[_Chunk] = []  # issued whole
        self._answers: dict[int, int] = {}  # bytes that workers were asked for, by book
        self._returned: SimpleQueue[Callable[[], None]] = SimpleQueue()  # what is to be done about chunks that ended
        self.predictions = Predictions()
        self.counts = Counts()

    def launch(self, plan: Batch, done: Done) -> None:
        """Takes a plan whose slot and blocks have just been written on the compute lane."""
        (row,) = plan.rows
        ends = deque(chunk_ends(row.start, row.start + row.count))
        issued = self._timelines.mark(Lane.COMPUTE)
        self._waiting.append(_Prompt(plan, done, issued, ends, row.start, time.monotonic()))
        self.go_on()

    @property
    def is_busy(self) -> bool:
        """Whether `go_on` is to be called again soon."""
        return bool(self._waiting) or self.is_issuing

    @property
    def is_issuing(self) -> bool:
        """Whether `go_on` is to be called again at once."""
        return self._issuing is not None

    @property
    def is_open(self) -> bool:
        """Whether some plan has not ended."""
        return bool(self._under_way) or self.is_busy

    def await_return(self, timeout_s: float) -> None:
        """Waits until a chunk that is under way has ended, if one is."""
        if self._under_way and not self.is_issuing:
            with contextlib.suppress(Empty):
                self._returned.get(timeout=timeout_s)()

    def go_on(self) -> None:
        """Sees to chunks that have ended, and issues a layer of the next if there is a book for it."""
        while not self._returned.empty():
            self._returned.get()()
            self._images.pump()  # what had to wait for the chunk's adapter to be free goes before the next chunk
        if self._issuing is None:
            self._begin_next()
        if self._issuing is not None:
            self._issue_layer(self._issuing)

    def fail(self, failure: Exception) -> None:
        """The device has failed: what has not been launched never will be."""
        if self._issuing is not None:
            self._give_up(self._issuing, failure)
        while self._waiting:
            self._waiting.popleft().done(failure)

    def _begin_next(self) -> None:
        if not self._waiting or not self._images.are_placed([self._waiting[0].plan.rows[0].adapter_slot]):
            return
        lives = lives_of(self._workers)
        self._books.tidy(lives)
        if (book := self._books.take()) is None:
            return
        prompt = self._waiting.popleft()
        if not self._under_way:
            self._attend(True)
        self._images.pool.hold(prompt.plan.rows[0].adapter_slot)
        self._issuing = _Issuing(prompt, book, self._issue_chunk(prompt, book, lives))

    def _issue_layer(self, issuing: _Issuing) -> None:
        """Whoever's turn it is, it may be another's than that of the plan being launched now."""
        try:
            next(issuing.layers)
        except StopIteration:
            self._issuing = None
        except Exception as error:
            self._give_up(issuing, error)

    def _give_up(self, issuing: _Issuing, failure: Exception) -> None:
        """A chunk that cannot be issued to its end."""
        self._issuing = None
        self._under_way = [chunk for chunk in self._under_way if chunk.book is not issuing.book]
        self._guard.forget(issuing.book)
        self._release(issuing.prompt.plan.rows[0].adapter_slot, issuing.book, lives_of(self._workers))
        issuing.prompt.done(failure)

    def _release(self, slot: int, book: Book, late: Sequence[Life] = ()) -> None:
        """What a chunk had. `late`: all workers, if one of them may write to it still."""
        self._images.pool.let_go(slot)
        self._queue.answered(self._answers.pop(book.offset, 0))
        self._books.give_back(book, late)
        if not self._under_way and not self.is_issuing:
            self._attend(False)

    # --- one chunk ---

    def _issue_chunk(self, prompt: _Prompt, book: Book, lives: Sequence[Life]) -> Iterator[None]:
        (whole,) = prompt.plan.rows
        end = prompt.ends.popleft()
        is_last = not prompt.ends
        row = replace(whole, start=prompt.at, count=end - prompt.at, samples=whole.samples and is_last)
        row = row if row.samples else replace(row, logprobs=None)
        outputs = outputs_of((row,), self._slots.prompt_tokens)
        shape = self._host.fill(self._batch_words, (row,), outputs, all_prompt=True)
        slot, bound = row.adapter_slot, self._images.bound[row.adapter_slot]
        chunk = AssistedChunk(
            slot=slot,
            book=book,
            sources=self._sources(bound, slot, row.count, lives),
            groups=bound.groups,
            ready=self._images.ready_words(slot),
            ready_generation=bound.generation,
        )
        written = self._writer.letters(chunk, bound.adapter, row.count, lives, self.predictions.tokens_per_worker)
        self.counts.slices += sum(letter.errands for letter in written)
        self._answers[book.offset] = sum(letter.answer_bytes for letter in written)
        self._queue.await_answers(self._answers[book.offset])
        terms = self._terms(chunk)
        self._guard.watch(book, {index: self._hand_off_s(row, bound) for _, _, index, _ in chunk.hand_offs()})

        def metadata(stream: Stream) -> None:
            self._ring.send(self._batch.words.data_ptr(), self._batch_words, Lane.ASSIST)
            for letter in written:
                self._ring.send(self._letters[letter.entry].data_ptr(), letter.words, Lane.ASSIST)
            self._driver.fill(self._flags.data_ptr(), self._flags.nbytes, stream)

        after = latest(at(Lane.COMPUTE, prompt.issued), self._images.pool.moved(slot))
        number = yield from self._lane.issue(metadata, self._decoder.work(shape, assist=terms), chunk, after)
        self._images.used([slot], Lane.ASSIST, number)
        prompt.at = end
        launched = _Chunk(prompt, row, outputs, book, number)
        self._under_way.append(launched)
        self._return_results(launched)

    def _return_results(self, chunk: _Chunk) -> None:
        stream = self._timelines.streams[Lane.ASSIST]
        results, address = self._results.take()
        copy_results(self._driver, self._batch, chunk.outputs, results, address, stream)
        errors = results.block[-4:].view(np.int32)
        where = address + results.block.nbytes - 4
        self._driver.copy_to_host(where, self._flags[1].data_ptr(), 4, stream)
        prompt_tokens = self._slots.prompt_tokens.copy()

        def ended(failure: DriverError | None) -> None:
            found = OutputValues(results.chosen, results.logprob, results.top_ids, results.top_logprobs)
            made = None
            if failure is None:
                made = collect(Batch((), (), (chunk.row,)), chunk.outputs, found, prompt_tokens)[0]
            is_void = bool(errors[0])
            self._results.give_back(results, address)
            self._returned.put(lambda: self._ended(chunk, failure, made, is_void=is_void))
            self._wake()

        self._waiter.when_done(stream, ended)

    def _ended(self, chunk: _Chunk, failure: DriverError | None, made: RowResult | None, *, is_void: bool) -> None:
        self._under_way.remove(chunk)
        given_up = self._guard.forget(chunk.book)
        prompt, book = chunk.prompt, chunk.book
        for index, entry in enumerate(book.entries):
            if self._words.load(entry.x_flag) == book.generation:
                prompt.cpu_layers.add(index // len(GROUPS))
        has_failed = given_up or is_void or failure is not None
        self._release(chunk.row.adapter_slot, book, lives_of(self._workers) if has_failed else ())
        if failure is not None:
            prompt.done(failure)
        elif given_up or is_void:
            self.counts.void_chunks += 1
            self._finish(prompt, RowResult(None, needs_retry=True))
        elif prompt.ends:
            self._waiting.append(prompt)
        else:
            assert made is not None
            self._finish(prompt, replace(made, cpu_layers=len(prompt.cpu_layers)))

    @staticmethod
    def _finish(prompt: _Prompt, result: RowResult) -> None:
        prompt.done(StepResult((result,), prompt.started_s, time.monotonic()))

    def _attend(self, under_way: bool) -> None:
        """Has workers stay awake, and those that have stopped be replaced, while chunks are under way: a book that one
        of these may still write to is nobody's until then."""
        self._workers.keep_awake(under_way)
        self._workers.watch(under_way)

    def warm_up(self, settle: Callable[[], None]) -> None:
        """Runs every kernel of the lane once in each of its forms, over a hand-off that was given up before. `settle`
        waits for the lane."""
        book = self._books.take()
        assert book is not None, "nothing is under way yet"
        self._words.store(book.status, book.generation)
        stream = self._timelines.streams[Lane.ASSIST]
        self._ring.send(self._batch.words.data_ptr(), self._host.empty(), Lane.ASSIST)
        chunk = AssistedChunk(0, book, [Source.WORKERS], [range(len(GROUPS))], self._images.ready_words(0), 1)
        for letter in self._writer.to_nobody(chunk):
            self._ring.send(self._letters[letter.entry].data_ptr(), letter.words, Lane.ASSIST)
        for tokens in (2, 16, ASSISTED_CHUNK_TOKENS):
            work = self._decoder.work(Shape(tokens, 0, 1, 1, 1, False, 0), assist=self._terms(chunk))
            for _ in self._lane.issue(lambda stream: None, work, chunk, NOTHING):
                pass
            settle()
        self._driver.fill(self._flags.data_ptr(), self._flags.nbytes, stream)
        settle()
        self._books.give_back(book)
        self._workers.keep_awake(False)

    # --- what a chunk is made of ---

    def _sources(self, bound: Bound, slot: int, tokens: int, lives: Sequence[Life]) -> list[Source]:
        """What is expected of each layer when the device gets there."""
        now_s, layer_s = time.monotonic(), self.predictions.layer_s(tokens)
        expected = self._queue.arrivals(slot, now_s)
        issued_s = self._queue.arrival_of_issued(now_s)
        can_help = any(life.incarnation is not None and life.is_idle for life in lives)
        stall_s = self.predictions.hand_off_s(tokens, bound.stored.rank) if can_help else None
        found = []
        for layer in range(self._spec.layers):
            group = self._copier.group_of(slot, layer)
            found.append(
                source(
                    arrived=group is None or self._copier.has_arrived(slot, layer),
                    arrives_s=issued_s if group is None else expected.get(group, issued_s),
                    use_s=now_s + layer * layer_s,
                    stall_s=stall_s,
                )
            )
        return found

    def _hand_off_s(self, row: ScheduledRow, bound: Bound) -> float:
        return self.predictions.hand_off_s(row.count, bound.stored.rank)

    def _terms(self, chunk: AssistedChunk) -> AssistTerms:
        room: HandOffRoom = self._rooms[chunk.book.offset]
        entries = range(self._spec.layers * len(GROUPS))
        base, size = self._letters.data_ptr(), 8 * self._letter_words
        return AssistTerms(
            slot=chunk.slot,
            gate=self._gate,
            letters=[base + size * index for index in entries],
            host_x=[self._memory.device_base + room.x] * len(entries),
            host_strides=[x_stride(self._spec, index % len(GROUPS)) for index in entries],
            asked=self._asked.data_ptr(),
            counter=self._flags[0].data_ptr(),
            errors=self._flags[1].data_ptr(),
        )
