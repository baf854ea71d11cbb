"""One simulated instance: continuous batching, with runs of equal iterations advanced in one step.

The rules are those of the engine and its scheduler: decode tokens first, then chunks of prompts in the order of
admission, within an iteration's token budget; a request joins at the first iteration that was not launched yet when it
arrived, and leaves with its last token. Between two changes of the batch all iterations take equally long, so a run of
them is computed in one step. Where the engine would preempt a request, here a request waits until its prompt and output
fit. Times are whole nanoseconds, so that the length of a run is exactly its count times the time of an iteration.
"""

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

from caraserve.bench.simulator.machines import Machine
from caraserve.cluster.routing.cost import Backlog

MS = 1_000_000  # nanoseconds
FOREVER = 1 << 62


def _chunked(request: "SimRequest") -> bool:
    return request.left != 1


class SimRequest:
    """One request. Times are in ns, −1 as long as they are not known."""

    __slots__ = ("adapter", "arrived", "done", "first", "index", "left", "output", "prompt", "rank", "ready")

    def __init__(self, index: int, arrived: int, adapter: int, rank: int, prompt: int, output: int) -> None:
        self.index, self.arrived, self.adapter, self.rank = index, arrived, adapter, rank
        self.prompt, self.output = prompt, output
        self.left = prompt  # tokens of the prompt to compute
        self.ready = self.first = self.done = -1


class IterationRun(NamedTuple):
    """A run of equal iterations."""

    start: int  # ns
    each: int  # time of an iteration, in ns
    times: int  # number of iterations
    decoding: int  # requests
    prompt_tokens: int  # in each iteration


class BatchSimulator:
    """The running and the waiting requests of one instance, under a virtual clock in ns."""

    def __init__(self, machine: Machine, trace: list[IterationRun] | None = None) -> None:
        self._machine, self._model, self._ahead = machine, machine.model, machine.launches_ahead
        self._trace = trace
        self.finished: list[SimRequest] = []  # since they were last taken
        self.busy_ns = self.steps = self.iterations = self.tokens = 0
        self._loading: list[tuple[int, int, SimRequest]] = []  # heap by the time at which the adapter is loaded
        self._waiting: deque[tuple[int, SimRequest]] = deque()  # with the first iteration that each may join
        self._prefilling: list[SimRequest] = []  # in order of admission
        self._decoding: list[tuple[int, int, SimRequest]] = []  # heap by the number of the last iteration
        self._chunks: list[tuple[SimRequest, int]] = []  # of the current iteration
        self._start = self._each = self._count = 0  # the current run of iterations; there is none if the count is 0
        self._first = 0  # number of the run's first iteration
        self._stop = FOREVER
        self._rank_sum = 0  # over decoding requests
        self._decoding_ranks: dict[int, int] = {}
        self._rank_max = 0
        self._ranks: dict[int, int] = {}  # rank → number of requests, over all requests of the instance
        self._ranks_sum = 0
        self._queued_tokens = self._queued_token_ranks = 0
        self._kv_free = machine.kv_tokens  # not used by admitted requests
        self._kv_promised = 0  # needed by waiting requests
        self._backlog: Backlog | None = None

    # --- state ---

    def backlog(self) -> Backlog:
        """Returns the backlog at the time advanced to; the same object until something changes."""
        if self._backlog is None:
            queued = len(self._waiting) + len(self._loading)
            self._backlog = Backlog(
                len(self._decoding) + len(self._prefilling) + queued,
                self._ranks_sum,
                max(self._ranks, default=0),
                self._queued_tokens,
                self._queued_token_ranks,
                self._machine.kv_tokens,
                self._kv_free - self._kv_promised,
                self._machine.max_queue - queued,
            )
        return self._backlog

    @property
    def outstanding_tokens(self) -> int:
        """KV tokens that all requests of the instance use or wait for, which dLoRA balances among instances."""
        return self._machine.kv_tokens - self._kv_free + self._kv_promised

    def check(self) -> None:
        """Raises AssertionError unless all requests have ended and all counters are back at their start values."""
        left = (len(self._loading), len(self._waiting), len(self._prefilling), len(self._decoding))
        assert not any(left), f"requests are left: {left}"
        assert (self._kv_free, self._kv_promised) == (self._machine.kv_tokens, 0), "memory is lost"
        sums = self._rank_sum, self._ranks_sum, self._queued_tokens, self._queued_token_ranks
        assert not any(sums), "sums differ"
        assert not self._ranks, "ranks are left"

    # --- requests ---

    def deliver(self, request: SimRequest, now: int, ready: int) -> None:
        """Adds a request whose adapter is on the device at the time `ready`."""
        request.ready = ready
        self._ranks[request.rank] = self._ranks.get(request.rank, 0) + 1
        self._ranks_sum += request.rank
        self._queued_tokens += request.prompt
        self._queued_token_ranks += request.prompt * request.rank
        self._kv_promised += request.prompt + request.output
        self._backlog = None
        if ready > now:
            heappush(self._loading, (ready, request.index, request))
        else:
            self._enter(request, now)

    def stuck(self) -> list[SimRequest]:
        """Returns the requests that wait only for memory or a slot."""
        return [request for joins, request in self._waiting if joins <= self._first]

    def take_back(self, request: SimRequest) -> None:
        """Removes a stuck request, which moves to another instance."""
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not request)
        self._backlog = None
        self._forget(request)
        self._kv_promised -= request.prompt + request.output
        self._queued_tokens -= request.left
        self._queued_token_ranks -= request.left * request.rank

    def _forget(self, request: SimRequest) -> None:
        self._ranks_sum -= request.rank
        count = self._ranks[request.rank] - 1
        if count:
            self._ranks[request.rank] = count
        else:
            del self._ranks[request.rank]

    # --- time ---

    def advance(self, now: int) -> None:
        """Simulates up to `now`, including iterations that end at `now`."""
        loading = self._loading
        while loading and loading[0][0] <= now:
            ready, _, request = heappop(loading)
            while self._stop <= ready:
                self._boundary()
            self._backlog = None
            self._enter(request, ready)
        while self._stop <= now:
            self._boundary()

    def _enter(self, request: SimRequest, now: int) -> None:
        """Queues a request whose adapter is loaded; everything before `now` has been simulated."""
        if not self._count:
            self._waiting.append((0, request))
            self._next(now)
            return
        joins = self._first + (now - self._start) // self._each + 1 + self._ahead
        self._waiting.append((joins, request))
        if joins < self._first + self._count:  # this run ends where the request joins
            self._count = joins - self._first
            self._stop = self._start + self._count * self._each

    def _boundary(self) -> None:
        """Ends the current run of iterations."""
        now, last = self._stop, self._first + self._count - 1
        self.steps += 1
        self.iterations += self._count
        self.tokens += self._count * len(self._decoding)
        self.busy_ns += now - self._start
        self._first = last + 1
        if self._trace is not None:
            tokens = sum(count for _, count in self._chunks)
            self._trace.append(IterationRun(self._start, self._each, self._count, len(self._decoding), tokens))
        decoding = self._decoding
        if decoding and decoding[0][0] == last:
            while decoding and decoding[0][0] == last:
                self._end(heappop(decoding)[2], now)
            self._rank_max = max(self._decoding_ranks, default=0)
        if self._chunks:
            self._prefilled(now, last)
        self._next(now)

    def _prefilled(self, now: int, last: int) -> None:
        for request, count in self._chunks:
            request.left -= count
            self._queued_tokens -= count
            self._queued_token_ranks -= count * request.rank
            if request.left:
                continue
            request.first = now
            self.tokens += 1
            rank = request.rank
            self._rank_sum += rank
            self._decoding_ranks[rank] = self._decoding_ranks.get(rank, 0) + 1
            if request.output == 1:
                self._end(request, now)
            else:
                heappush(self._decoding, (last + request.output - 1, request.index, request))
        self._rank_max = max(self._decoding_ranks, default=0)
        self._prefilling = [request for request in self._prefilling if request.left]
        self._backlog = None

    def _end(self, request: SimRequest, now: int) -> None:
        rank = request.rank
        self._rank_sum -= rank
        count = self._decoding_ranks[rank] - 1
        if count:
            self._decoding_ranks[rank] = count
        else:
            del self._decoding_ranks[rank]
        self._forget(request)
        self._kv_free += request.prompt + request.output
        request.done = now
        self.finished.append(request)
        self._backlog = None

    def _next(self, now: int) -> None:
        """Admits waiting requests and plans the next run of iterations."""
        waiting, number = self._waiting, self._first
        if waiting:
            # An idle engine has launched no iteration ahead, so requests join at once.
            idle = not self._decoding and not self._prefilling
            while waiting and (waiting[0][0] <= number or idle) and self._admit(waiting[0][1]):
                waiting.popleft()
        self._start = now
        running = len(self._decoding)
        if self._prefilling:
            self._run_mixed(running)
        elif running:
            count = self._decoding[0][0] + 1 - number
            if waiting and number < waiting[0][0] < number + count:
                count = waiting[0][0] - number
            self._run(count, self._model.decode_ms(running, self._rank_sum, self._rank_max))
        else:
            self._chunks, self._count, self._stop = [], 0, FOREVER

    def _admit(self, request: SimRequest) -> bool:
        needed = request.prompt + request.output
        if needed > self._kv_free or len(self._decoding) + len(self._prefilling) >= self._machine.max_running:
            return False
        self._kv_free -= needed
        self._kv_promised -= needed
        self._prefilling.append(request)
        self._backlog = None
        return True

    def _run_mixed(self, running: int) -> None:
        budget = self._machine.max_step_tokens - running
        tokens = token_ranks = 0
        chunks = []
        # The scheduler treats the last token of a prompt like a decode token: it comes before all chunks.
        for request in sorted(self._prefilling, key=_chunked):
            count = min(request.left, budget - tokens)
            if count == 0:
                break
            chunks.append((request, count))
            tokens += count
            token_ranks += count * request.rank
        each_ms = self._model.iteration_ms(running, self._rank_sum, self._rank_max, tokens, token_ranks)
        self._run(1, each_ms)
        self._chunks = chunks

    def _run(self, count: int, each_ms: float) -> None:
        self._chunks = []
        self._count, self._each = count, max(1, round(each_ms * MS))
        self._stop = self._start + count * self._each
