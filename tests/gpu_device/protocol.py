"""Stage `protocol`: hand-offs are correct over many rounds, and wherever workers stop or die."""

import os
import signal
import time
from dataclasses import replace
from queue import SimpleQueue

from caraserve.bench.gpu.backends import TINY_CONTEXT, TinyModel, cuda_backend
from caraserve.bench.gpu.results import StageResult, WrongResult
from caraserve.bench.gpu.session import Prompt, Session, tokens, wait_for_load
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.core.batch import Batch, ScheduledRow, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.core.machine_profile import SCHEMA, Decode, DecodePoint, LoraRate, Prefill, PrefillPoint, Profile
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.errors import BackendFailed
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.forward.builder import GpuSizes
from caraserve.model.dtype import Dtype
from tests.gpu_device.handshake_rounds import handshake_bench, run_rounds
from tests.gpu_device.held_copy_driver import HeldCopyDriver

_RELEASE_TARGET_MS = 5.0
_PROMPT_TOKENS = 12
_DECODES = 8
_ROUNDS_SHARE = 0.3  # share of the stage's time for each way of waiting
_BIRTH_S = 60.0
_ADAPTER_SLOT, _BYSTANDER, _ASSISTED = 1, 0, 1
# Predictions by which nothing arrives in time, and hand-offs are aborted only after a while.
_PROFILE = Profile(
    schema=SCHEMA,
    machine="",
    model="",
    made_unix_s=0.0,
    quick=True,
    link_bytes_per_s=1.0,
    link_latency_ms=0.0,
    handoff_ms=20.0,
    lora=(LoraRate(8, "qkv", 1e6, 0.0), LoraRate(8, "all", 1e6, 0.0)),
    prefill=Prefill.fitted([PrefillPoint(1, 0, 1.0)]),
    decode=Decode.fitted([DecodePoint(1, 0, 0, 1.0)]),
)


def protocol(setup: CheckSetup) -> StageResult:
    """Runs the stage. Raises WrongResult for a wrong sum or a prompt that is not aborted."""
    result = StageResult()
    _check_handshakes(setup, result)
    _check_worker_failures(setup, result)
    return result


def _check_handshakes(setup: CheckSetup, result: StageResult) -> None:
    effort = setup.effort
    acc = setup.accelerator(effort.dtypes[0])
    generator = acc.generator(0)
    with handshake_bench(setup, acc) as bench:
        for name, by_stream in (("stream", True), ("kernel", False)):
            run_rounds(
                bench, min(effort.rounds_at_once, effort.rounds), generator, by_stream=by_stream
            )  # loads the kernels
            spent_s, done, until_s = 0.0, 0, setup.left_s - _ROUNDS_SHARE * setup.budget_s
            while done < effort.rounds and setup.left_s > until_s:
                spent_s += (
                    run_rounds(bench, effort.rounds_at_once, generator, by_stream=by_stream) * effort.rounds_at_once
                )
                done += effort.rounds_at_once
            us = 1e6 * spent_s / max(done, 1)
            result.figures[f"wait_by_{name}"] = {"rounds": done, "us_a_round": us}
            result.add_line(f"{done} hand-offs, waiting by {name}", f"all right, {us:.1f} µs each")


class _AssistedPrompt:
    """A tiny model, an adapter whose weights do not arrive, and workers that may be stopped."""

    def __init__(self, backend: CudaBackend, link: HeldCopyDriver, model: TinyModel) -> None:
        self.backend, self.link = backend, link
        self.session = Session(backend, TINY_CONTEXT - 1)
        self.session.grow_kv(2)
        self.adapter: HostAdapter = model.read(backend.host_memory)[0]
        self.vocab = model.spec.vocab_size
        self.request = Prompt(_ASSISTED, tokens(_PROMPT_TOKENS, self.vocab, 3), _ADAPTER_SLOT)
        self._row = ScheduledRow(_ASSISTED, 0, _PROMPT_TOKENS, _ADAPTER_SLOT, samples=True)
        self._loading: SimpleQueue[Exception | None] = SimpleQueue()
        self.right = self._alone()

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

    def begin(self) -> None:
        """Starts the prompt as a side batch while the copy of its weights is held."""
        self.link.hold()
        self._loading = self.session.start_load(self.adapter, _ADAPTER_SLOT)
        self.session.launch(self.session.started([self.request], [replace(self._row, assist=True)], is_side_batch=True))

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


def _check_worker_failures(setup: CheckSetup, result: StageResult) -> None:
    model = TinyModel.write(setup.folder)
    opened = setup.open(Dtype.F32)[0]
    link = HeldCopyDriver(opened.driver)
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
    with cuda_backend(setup, model.spec, Dtype.F32, sizes, folder=model.folder, device=device, warm=True) as backend:
        backend.start_workers(lambda rank: 64)
        backend.use(_PROFILE)
        if not backend.workers.await_all(_BIRTH_S):
            raise BackendFailed("the CPU LoRA workers are not there")
        prompt = _AssistedPrompt(backend, link, model)
        _check_assisted(prompt, result)
        _check_stopped_workers(prompt, result)
        _check_killed_workers(prompt, setup.effort.kills, result)
    link.close()


def _check_assisted(prompt: _AssistedPrompt, result: StageResult) -> None:
    """Checks that workers compute every layer and give the same token."""
    prompt.begin()
    (made,) = prompt.session.next().result.rows
    if made.needs_retry or made.token_id != prompt.right:
        raise WrongResult(f"with CPU workers' help the token is {made.token_id}, without it {prompt.right}")
    result.figures["cpu_layers"] = made.cpu_layers
    result.add_line("a prompt whose weights do not come", f"right, {made.cpu_layers} layers by CPU workers")
    prompt.end()


def _check_stopped_workers(prompt: _AssistedPrompt, result: StageResult) -> None:
    """Checks that other requests decode while the prompt waits for stopped workers, until it is aborted."""
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
    result.figures |= {"decodes_beside": passed, "given_up_ms": given_up_ms}
    told = f"{passed} of {_DECODES} iterations passed it"
    result.add_line("a prompt that waits for workers", told, f"{_DECODES}", passed == _DECODES)
    result.add_line("… is given up after", f"{given_up_ms:.1f} ms")
    prompt.end()


def _check_killed_workers(prompt: _AssistedPrompt, kills: int, result: StageResult) -> None:
    """Checks that the device is released soon after its workers have died."""
    times_ms = []
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
    result.figures["released_ms"] = times_ms
    result.at_most("ms from a worker's death to its release", max(times_ms), _RELEASE_TARGET_MS)


def _is_void(result: StepResult) -> bool:
    return result.rows[0].needs_retry
