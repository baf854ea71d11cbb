"""Stage `warm`: after its warm-up, a backend compiles and loads no kernel, whatever batches it serves."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from caraserve.bench.synthetic import shape_plan
from caraserve.core.batch import Batch, ScheduledRow, SlotSampling
from caraserve.core.lora_layout import HostAdapter
from caraserve.core.machine_profile import SCHEMA, Decode, DecodePoint, LoraRate, Prefill, PrefillPoint, Profile
from caraserve.errors import BackendFailed
from caraserve.gpu.builder import GpuSizes
from caraserve.util.units import human_bytes
from scripts.laboratory.gpu.backends import DTYPE, cuda_backend
from scripts.laboratory.gpu.cold import group_ends
from scripts.laboratory.gpu.measured_model import MeasuredModel
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.session import Prompt, tokens, wait_for_load
from scripts.laboratory.gpu.setup import CheckSetup

_RANK = 8
_BIRTH_S = 60.0
_LOADED, _ARRIVING = 1, 2  # adapter slots
_LONGEST = 160  # tokens of a prompt: more than a chunk of an assisted prefill
# Predicts that no weights arrive in time, so that CPU workers are asked, and waits 20 ms before a hand-off is aborted.
NOTHING_ARRIVES = Profile(
    schema=SCHEMA,
    machine="",
    model="",
    made_unix_s=0.0,
    quick=True,
    link_bytes_per_s=1.0,
    link_latency_ms=0.0,
    handoff_ms=20.0,
    lora=(LoraRate(_RANK, "qkv", 1e6, 0.0), LoraRate(_RANK, "all", 1e6, 0.0)),
    prefill=Prefill.fitted([PrefillPoint(1, 0, 1.0)]),
    decode=Decode.fitted([DecodePoint(1, 0, 0, 1.0)]),
)


@dataclass(frozen=True, slots=True)
class WarmFigures:
    """What happened after warm-up."""

    batches: int
    late_kernels: int  # Triton's kernels that were compiled or loaded
    device_bytes: int  # that were taken; modules that are loaded take some


def warm(setup: CheckSetup) -> StageResult[WarmFigures]:
    """Serves batches of many sizes, with and without adapters, while adapters arrive and while CPU workers help."""
    effort, lines = setup.effort, Lines()
    slots = max(effort.warm_batches) + 1  # one for a prompt beside the most that decode
    plan = shape_plan(effort.warm_shape, 2 * _LONGEST)
    device = setup.open(DTYPE)[0]
    sizes = GpuSizes(
        num_slots=slots,
        adapter_slots=effort.warm_adapter_slots,
        max_step_tokens=max(_LONGEST, slots),
        max_context=_LONGEST + 16,
        memory_utilization=0.85,
        host_bytes=64 << 20,
        pool_bytes=512 << 20,
        graph_bytes=effort.graph_bytes,
        lora_cpus=setup.cores(2),
    )
    with cuda_backend(setup, plan, DTYPE, sizes, device=device) as backend:
        subject = MeasuredModel(setup, backend, plan, _LONGEST)
        backend.start_workers(lambda rank: 64)
        backend.use(NOTHING_ARRIVES)
        if not backend.workers.await_all(_BIRTH_S):
            raise BackendFailed("the CPU LoRA workers are not there")
        fitting = subject.grow_contexts(slots)
        adapter = subject.adapter(_RANK, "all")
        assert adapter is not None, "the host tier is too small"
        free_bytes = device.driver.free_bytes()
        batches = _serve_all(subject, adapter, fitting)
        taken_bytes, late = free_bytes - device.driver.free_bytes(), backend.late_kernels
    lines.at_most(f"kernels compiled or loaded after warm-up, {batches} batches", late, 0, ".0f")
    lines.add("device memory taken after warm-up", human_bytes(max(0, taken_bytes)))
    return StageResult(WarmFigures(batches, late, taken_bytes), lines.all)


def _serve_all(subject: MeasuredModel, adapter: HostAdapter, slots: int) -> int:
    """Serves every kind of batch; returns how many."""
    session, served = subject.session, 0
    session.load(adapter, _LOADED)
    for batch in _batches(subject, slots):
        session.run(batch)
        served += 1
    for count in subject.setup.effort.warm_prompts:
        for is_assisted in (False, True):
            loading = session.start_load(adapter, _ARRIVING, group_ends(adapter.spec))
            session.run(subject.prompt_batch(count, _ARRIVING, 0, is_side_batch=is_assisted))
            wait_for_load(loading)
            subject.backend.unload_adapter(_ARRIVING)
            served += 1
    return served


def _batches(subject: MeasuredModel, slots: int) -> Iterator[Batch]:
    """Yields prompts of every length, and decode iterations of every size, of the base model and with an adapter, some
    beside a prompt."""
    effort, vocab = subject.setup.effort, subject.plan.vocab_size
    for count in effort.warm_prompts:
        for adapter in (0, _LOADED):
            yield subject.prompt_batch(count, adapter, 0)
    sampling = replace(SlotSampling.greedy(1), temperature=1.0, top_p=0.9, top_k=20, presence_penalty=0.5)
    prompts = [Prompt(slot, tokens(1, vocab, slot)) for slot in range(slots)]
    started = subject.session.started(prompts, [ScheduledRow(slot, 0, 1, 0, samples=True) for slot in range(slots)])
    yield replace(started, starts=tuple(replace(start, sampling=sampling) for start in started.starts))
    for size in (size for size in effort.warm_batches if size <= slots):
        for first in {0, size // 2, size}:  # of the rows with the adapter
            adapters = [0] * first + [_LOADED] * (size - first)
            rows = [ScheduledRow(slot, 1, 1, adapter, samples=True) for slot, adapter in enumerate(adapters)]
            rows[0] = structs.replace(rows[0], logprobs=3)
            yield Batch((), (), tuple(rows))
            if size < slots:
                prompt = subject.prompt_batch(min(effort.warm_prompts) + size, _LOADED, size)
                yield replace(prompt, rows=(*rows, *prompt.rows))
