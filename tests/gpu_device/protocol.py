"""Stage `protocol`: hand-offs are correct over many rounds, and wherever workers stop or die."""

import os
import signal
import time
from dataclasses import dataclass, replace
from queue import SimpleQueue

from msgspec import structs

from caraserve.core.batch import Batch, ScheduledRow, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.errors import BackendFailed
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.builder import GpuSizes
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.backends import TINY_CONTEXT, TinyModel, cuda_backend
from scripts.laboratory.gpu.held_link import HeldLink
from scripts.laboratory.gpu.results import Lines, StageResult, WrongResult
from scripts.laboratory.gpu.session import Prompt, Session, tokens, wait_for_load
from scripts.laboratory.gpu.setup import CheckSetup
from scripts.laboratory.gpu.warm import NOTHING_ARRIVES
from tests.gpu_device.handshake_rounds import HandshakeBench, handshake_bench, run_rounds

_RELEASE_TARGET_MS = 5.0
_PROMPT_TOKENS = 12
_DECODES = 8
_ROUNDS_SHARE = 0.3  # share of the stage's time for each way of waiting
_BIRTH_S = 60.0
_ADAPTER_SLOT, _BYSTANDER, _ASSISTED = 1, 0, 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """Hand-offs in a row, all right."""

    rounds: int
    us_a_round: float


@dataclass(frozen=True, slots=True)
class WorkerFailures:
    """A prompt that waits for workers which stand still, and workers that die while a prompt waits for them."""

    decodes_beside: int  # iterations that passed the waiting prompt
    given_up_ms: float
    released_ms: tuple[float, ...]  # from each worker's death to the release of its prompt


@dataclass(frozen=True, slots=True)
class ProtocolFigures:
    """Hand-offs by how the device waits for the answer, layers of a prompt by workers, and workers that fail."""

    wait_by_stream: Rounds
    wait_by_kernel: Rounds
    cpu_layers: int
    failures: WorkerFailures


def protocol(setup: CheckSetup) -> StageResult[ProtocolFigures]:
    """Runs the stage. Raises WrongResult for a wrong sum or a prompt that is not aborted."""
    lines = Lines()
    by_stream, by_kernel = _check_handshakes(setup, lines)
    cpu_layers, failures = _check_assisted_prompts(setup, lines)
    return StageResult(ProtocolFigures(by_stream, by_kernel, cpu_layers, failures), lines.all)


def _check_handshakes(setup: CheckSetup, lines: Lines) -> tuple[Rounds, Rounds]:
    acc = setup.accelerator(setup.effort.dtypes[0])
    with handshake_bench(setup, acc) as bench:
        by_stream = _rounds(setup, bench, by_stream=True)
        by_kernel = _rounds(setup, bench, by_stream=False)
    for name, each in (("stream", by_stream), ("kernel", by_kernel)):
        lines.add(f"{each.rounds} hand-offs, waiting by {name}", f"all right, {each.us_a_round:.1f} µs each")
    return by_stream, by_kernel


def _rounds(setup: CheckSetup, bench: HandshakeBench, *, by_stream: bool) -> Rounds:
    """Runs as many rounds as are wanted, or as fit in a share of the stage's time."""
    effort, generator = setup.effort, bench.acc.generator(0)
    at_once = min(effort.rounds_at_once, effort.rounds)
    run_rounds(bench, at_once, generator, by_stream=by_stream)  # loads the kernels
    spent_s, done, until_s = 0.0, 0, setup.left_s - _ROUNDS_SHARE * setup.budget_s
    while done < effort.rounds and setup.left_s > until_s:
        spent_s += run_rounds(bench, at_once, generator, by_stream=by_stream) * at_once
        done += at_once
    return Rounds(done, 1e6 * spent_s / max(done, 1))


class _AssistedPrompt:
    """A tiny model, an adapter whose weights do not arrive, and workers that may be stopped."""

    def __init__(self, backend: CudaBackend, link: HeldLink, model: TinyModel) -> None:
        self.backend, self.link = backend, link
        self.session = Session(backend, TINY_CONTEXT - 1)
        self.session.grow_kv(2)
        self.adapter: HostAdapter = model.read(backend.host_memory)[0]
        self.vocab = model.plan.vocab_size
        self.request = Prompt(_ASSISTED, tokens(_PROMPT_TOKENS, self.vocab, 3), _ADAPTER_SLOT)
        self._row = ScheduledRow(_ASSISTED, 0, _PROMPT_TOKENS, _ADAPTER_SLOT, samples=True)
        self._loading: SimpleQueue[Exception | None] = SimpleQueue()
        self.right = self._alone()
        self._load_kernels()

    @property
    def workers(self) -> WorkerPool:
        return self.backend.workers

    def _alone(self) -> int | None:
        """Returns the prompt's token, computed with all weights loaded."""
        self.session.load(self.adapter, _ADAPTER_SLOT)
        token = self.compute_alone()
        self.backend.unload_adapter(_ADAPTER_SLOT)
        return token

    def compute_alone(self) -> int | None:
        """Computes the prompt without workers and returns its token."""
        (ended,) = self.session.run(self.session.started([self.request], [self._row]))
        return ended.result.rows[0].token_id

    def _load_kernels(self) -> None:
        """Computes the prompt as a side batch with the link open. While it is held nothing may be loaded: a module's
        load may wait for the stream that waits for this thread."""
        self._launch_assisted()
        self.session.next()
        wait_for_load(self._loading)
        self.backend.unload_adapter(_ADAPTER_SLOT)

    def begin(self) -> None:
        """Starts the prompt as a side batch while the copy of its weights is held."""
        self.link.hold()
        self._launch_assisted()

    def _launch_assisted(self) -> None:
        self._loading = self.session.start_load(self.adapter, _ADAPTER_SLOT)
        self.session.launch(
            self.session.started([self.request], [structs.replace(self._row, assist=True)], is_side_batch=True)
        )

    def end(self) -> None:
        """Lets the weights arrive and checks the prompt without workers."""
        self.link.release()
        wait_for_load(self._loading)
        if self.compute_alone() != self.right:
            raise WrongResult("a prompt that was given up is not right when it is computed again")
        self.backend.unload_adapter(_ADAPTER_SLOT)
        if not self.workers.await_all(_BIRTH_S):
            raise BackendFailed("a CPU LoRA worker that died was not replaced")

    def await_worker_busy(self) -> None:
        """Waits until the device has asked a worker that is stopped."""
        until_s = time.monotonic() + _BIRTH_S
        while not any(state.is_busy for state in self.workers.states()):
            if time.monotonic() > until_s:
                raise WrongResult("the device has not asked a CPU worker whose help it was to wait for")
            os.sched_yield()

    def signal(self, number: signal.Signals) -> None:
        for state in self.workers.states():
            if state.pid is not None:
                os.kill(state.pid, number)


def _check_assisted_prompts(setup: CheckSetup, lines: Lines) -> tuple[int, WorkerFailures]:
    """Returns by how many layers of a prompt workers help, and what happens when they fail it."""
    model = TinyModel.write(setup.folder)
    opened = setup.open(Dtype.F32)[0]
    link = HeldLink(opened.driver)
    sizes = GpuSizes(
        num_slots=2,
        adapter_slots=2,
        max_step_tokens=_PROMPT_TOKENS + 1,
        max_context=TINY_CONTEXT,
        memory_utilization=0.9,
        host_bytes=8 << 20,
        pool_bytes=32 << 20,
        graph_bytes=setup.effort.graph_bytes,
        lora_cpus=setup.cores(2),
    )
    device = replace(opened, driver=link.driver)
    with cuda_backend(setup, model.plan, Dtype.F32, sizes, folder=model.folder, device=device, warm=True) as backend:
        backend.start_workers(lambda rank: 64)
        backend.use(NOTHING_ARRIVES)
        if not backend.workers.await_all(_BIRTH_S):
            raise BackendFailed("the CPU LoRA workers are not there")
        prompt = _AssistedPrompt(backend, link, model)
        cpu_layers = _check_assisted(prompt, lines)
        decodes_beside, given_up_ms = _check_stopped_workers(prompt, lines)
        released_ms = _check_killed_workers(prompt, setup.effort.kills, lines)
    link.close()
    return cpu_layers, WorkerFailures(decodes_beside, given_up_ms, released_ms)


def _check_assisted(prompt: _AssistedPrompt, lines: Lines) -> int:
    """Checks that workers compute layers and give the same token; returns how many layers."""
    prompt.begin()
    (made,) = prompt.session.next().result.rows
    if made.needs_retry or made.token_id != prompt.right:
        raise WrongResult(f"with CPU workers' help the token is {made.token_id}, without it {prompt.right}")
    lines.add("a prompt whose weights do not come", f"right, {made.cpu_layers} layers by CPU workers")
    prompt.end()
    return made.cpu_layers


def _check_stopped_workers(prompt: _AssistedPrompt, lines: Lines) -> tuple[int, float]:
    """Checks that other requests decode while the prompt waits for stopped workers, until it is aborted. Returns how
    many iterations passed the prompt, and the ms until it was aborted."""
    bystander = Prompt(_BYSTANDER, tokens(4, prompt.vocab), 0)
    prompt.session.run(prompt.session.started([bystander], [ScheduledRow(_BYSTANDER, 0, 4, 0, samples=True)]))
    prompt.signal(signal.SIGSTOP)
    try:
        prompt.begin()
        prompt.await_worker_busy()
        started_s = time.monotonic()
        for index in range(_DECODES):
            prompt.session.launch(Batch((), (), (ScheduledRow(_BYSTANDER, 4 + index, 1, 0, samples=True),)))
        ended = [prompt.session.next() for _ in range(_DECODES + 1)]
    finally:
        prompt.signal(signal.SIGCONT)
    void = [index for index, each in enumerate(ended) if each.result.rows[0].needs_retry]
    if len(void) != 1:
        raise WrongResult("a prompt whose workers stand still was not given up")
    passed = void[0]  # iterations that ended before the prompt was aborted
    given_up_ms = 1000 * (ended[passed].received_s - started_s)
    said = f"{passed} of {_DECODES} iterations passed it"
    lines.add("a prompt that waits for workers", said, f"{_DECODES}", passed == _DECODES)
    lines.add("… is given up after", f"{given_up_ms:.1f} ms")
    prompt.end()
    return passed, given_up_ms


def _check_killed_workers(prompt: _AssistedPrompt, kills: int, lines: Lines) -> tuple[float, ...]:
    """Checks that the device is released soon after its workers have died; returns the ms of each time."""
    times_ms = list[float]()
    for _ in range(kills):
        prompt.signal(signal.SIGSTOP)
        prompt.begin()
        prompt.await_worker_busy()
        prompt.signal(signal.SIGKILL)
        died_s = time.monotonic()
        ended = prompt.session.next()
        if not _is_void(ended.result):
            raise WrongResult("a prompt whose workers are dead was not given up")
        times_ms.append(1000 * (ended.received_s - died_s))
        prompt.end()
    lines.at_most("ms from a worker's death to its release", max(times_ms), _RELEASE_TARGET_MS)
    return tuple(times_ms)


def _is_void(result: StepResult) -> bool:
    return result.rows[0].needs_retry
