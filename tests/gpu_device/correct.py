"""Stage `correct`: compares every kernel with fp64 on random cases, and a whole model with the CPU backend.

Memory that a kernel must not read, and memory that it must write, is filled with NaN. The bits of a row computed alone
and in a batch are compared for LoRA and decode attention, and those of a prompt's attention for two chunkings; cuBLAS,
which computes the base model's products, does not guarantee equal bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from caraserve.core.backend import Backend
from caraserve.gpu.builder import GpuSizes
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.backends import TINY_CONTEXT, TinyModel, cpu_backend, cuda_backend
from scripts.laboratory.gpu.results import Lines, StageResult, WrongResult
from scripts.laboratory.gpu.session import Prompt, Session, tokens
from scripts.laboratory.gpu.setup import CheckSetup
from tests.gpu_device.correct_experts import check_experts
from tests.gpu_device.correct_lora import check_bgmv, check_prefill_lora
from tests.gpu_device.correct_model import check_attention, check_layers, check_rotation
from tests.gpu_device.correct_quantized import check_quantized
from tests.gpu_device.correct_sampling import check_sampling
from tests.gpu_device.correct_words import check_words

Check = Callable[[CheckSetup, Accelerator, int], float]
CHECKS: dict[str, Check] = {
    "decode LoRA": check_bgmv,
    "prefill LoRA": check_prefill_lora,
    "attention": check_attention,
    "rotation and KV append": check_rotation,
    "norm, SiLU, embedding": check_layers,
    "quantised weights": check_quantized,
    "experts": check_experts,
    "sampling": check_sampling,
    "small arrays and words": check_words,
}
_FEWER = 4  # number of cases relative to the decode LoRA kernels, which have the most
_ADAPTER_SLOTS = 5
_CHUNK = 24  # tokens per chunk of a prompt
_KEPT_S = 30.0  # time reserved for the tiny model


@dataclass(frozen=True, slots=True)
class CheckedCases:
    """Random cases of one kernel with activations of one dtype, all right."""

    cases: int
    worst_share_of_tolerance: float


@dataclass(frozen=True, slots=True)
class CorrectFigures:
    """The cases by kernel and dtype, and the tokens of the tiny model that are the CPU's."""

    kernels: dict[str, dict[str, CheckedCases]]
    tiny_model_tokens: int


def correct(setup: CheckSetup) -> StageResult[CorrectFigures]:
    """Runs the stage. Raises WrongResult at the first wrong result."""
    lines, kernels = Lines(), {name: dict[str, CheckedCases]() for name in CHECKS}
    for dtype in setup.effort.dtypes:
        if dtype is not setup.effort.dtypes[0] and setup.left_s < _KEPT_S:
            lines.add(f"kernels beside fp64, {dtype.name.lower()}", "not checked: the stage's time is up")
            continue
        acc = setup.accelerator(dtype)
        for name, check in CHECKS.items():
            kernels[name][dtype.name.lower()] = _check_cases(setup, acc, check)
    counts = [each.cases for by_dtype in kernels.values() for each in by_dtype.values()]
    lines.add("kernels beside fp64", f"{sum(counts)} random cases right")
    found = _check_model(setup)
    lines.add("a whole model beside the CPU's, fp32", "token for token, launched and replayed")
    return StageResult(CorrectFigures(kernels, found), lines.all)


def _check_cases(setup: CheckSetup, acc: Accelerator, check: Check) -> CheckedCases:
    """Checks one kernel: at least one case, and as many as wanted while there is time."""
    cases = setup.effort.cases if check is check_bgmv else max(1, setup.effort.cases // _FEWER)
    shares = list[float]()
    for case in range(cases):
        if case and setup.left_s < _KEPT_S:
            break
        shares.append(check(setup, acc, case))
    return CheckedCases(len(shares), max(shares))


def _check_model(setup: CheckSetup) -> int:
    """Checks the model launched kernel by kernel and with graphs."""
    model, slots = TinyModel.write(setup.folder), len(setup.effort.tiny_lengths)
    step_tokens = max(slots, sum(min(length, _CHUNK) for length in setup.effort.tiny_lengths))
    with cpu_backend(model, slots, _ADAPTER_SLOTS, step_tokens) as judge:
        expected = _served(setup, judge, model)
    for way, warm in (("launched", False), ("replayed", True)):
        sizes = GpuSizes(
            num_slots=slots,
            adapter_slots=_ADAPTER_SLOTS,
            max_step_tokens=step_tokens,
            max_context=TINY_CONTEXT,
            memory_utilization=0.9,
            host_bytes=8 << 20,
            pool_bytes=64 << 20,
        )
        with cuda_backend(setup, model.plan, Dtype.F32, sizes, folder=model.folder, warm=warm) as backend:
            got = _served(setup, backend, model)
        for prompt, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if ours != theirs:
                at = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
                raise WrongResult(f"tiny model, {way}: token {at} of answer {prompt} is not the CPU's")
    return sum(map(len, expected))


def _served(setup: CheckSetup, backend: Backend, model: TinyModel) -> list[list[int]]:
    """Returns the tokens of requests for the base model and all adapters, some of which share one."""
    session, vocab, lengths = Session(backend, TINY_CONTEXT - 1), model.plan.vocab_size, setup.effort.tiny_lengths
    session.grow_kv(len(lengths))
    for slot, adapter in enumerate(model.read(backend.host_memory), start=1):
        session.load(adapter, slot)
    prompts = [Prompt(slot, tokens(length, vocab, slot), slot % _ADAPTER_SLOTS) for slot, length in enumerate(lengths)]
    return session.serve(prompts, setup.effort.tiny_new, _CHUNK)
