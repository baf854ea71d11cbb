"""Builds the backend of --device, with the defaults of the CPU or the GPU."""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.backend import Backend
from caraserve.core.machine_profile import Profile
from caraserve.core.matrix_copy import CopyMatrices
from caraserve.errors import ConfigError, ModelLoadError
from caraserve.gpu.driver.detect import DeviceChoice, detect, has_packages
from caraserve.gpu.driver.environment import library_folder, prepare_environment
from caraserve.model.checkpoint import open_tensors
from caraserve.model.dtype import DTYPES, NAMES, Dtype
from caraserve.model.formats import TensorReader
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import frequencies_note
from caraserve.model.sentence_format import read_sentence_format
from caraserve.telemetry.progress import CompileProgress, progress
from caraserve.telemetry.trace import Trace
from caraserve.util.memory import free_bytes
from caraserve.util.units import human_bytes

if TYPE_CHECKING:  # these modules import kernels, which are compiled after all checks
    from caraserve.cpu.lora_workers.pool import WorkerPool
    from caraserve.cpu.lora_workers.timing import RoundTrip

log = logging.getLogger(__name__)

ADAPTER_SLOTS = 1025  # entries of the device adapter table; the limit in bytes is reached first
_DEFAULT_CONTEXT_TOKENS = 8192  # limit for models that allow more; --max-model-len raises it
_CPU_SEQS, _GPU_SEQS = 64, 256
# Past the roofline's knee: larger chunks gain nothing.
_CPU_STEP_TOKENS, _GPU_STEP_TOKENS = 256, 2048
_KV_SHARE, _KV_MOST_BYTES = 0.3, 8 << 30  # default size of the KV cache: this share of free memory, at most 8 GiB
_GPU_PACKAGES = "torch", "triton.language", "cupy"
_SWITCH_S = 0.0005  # Python's thread switch interval: the device waits for the threads that launch work


class ServingBackend(Backend, Protocol):
    """A backend with all that a server uses beside batches: LoRA workers, predictions, facts for logs and metrics."""

    device_name: str  # for log lines
    accelerator: str  # the GPU's name; empty without one
    shares_cores: bool  # whether LoRA workers use cores that iterations need
    delta_itemsize: int  # bytes of each number that LoRA workers send over the link to the device
    pads_to_largest_rank: bool  # whether adapters are computed at the largest rank in a batch
    workers: "WorkerPool"

    def start_workers(self, tokens_per_worker: Callable[[int], int]) -> None:
        """Starts the LoRA workers; call it once. `tokens_per_worker(rank)` limits the tokens that one worker gets."""

    def use(self, profile: Profile, *, slice_tokens: int | None = None) -> None:
        """Makes the backend use this profile for its predictions from now on. `slice_tokens`: most tokens that one
        LoRA worker gets, whatever the rank (None: by the profile)."""

    def emulate_link(self, bytes_per_s: float) -> None:
        """Slows loads down to a bandwidth from now on. Raises ConfigError if the backend cannot."""

    def time_hand_off(self, slot: int, tokens: int) -> "RoundTrip | None":
        """Times one hand-off to the workers with the adapter in `slot`; None if no worker was free."""

    @property
    def slices_handed_off(self) -> int: ...

    @property
    def modules_redone(self) -> int: ...

    @property
    def adapters_merged(self) -> int: ...

    @property
    def late_kernels(self) -> int:
        """Returns how many kernels were compiled or loaded after the start."""


class DeviceSearch:
    """Finds the device of --device on a thread, while a model's files are read; on a machine with a GPU's driver and
    packages, another thread imports these, which takes seconds."""

    def __init__(self, wanted: str) -> None:
        self._threads, self._is_closed = ThreadPoolExecutor(2, "caraserve-device"), False
        self._choice = self._threads.submit(lambda: detect(wanted))
        if wanted != "cpu" and library_folder() is not None and has_packages():
            prepare_environment()  # here, as other threads may read the environment while one imports
            self._threads.submit(self._import)

    def choice(self) -> DeviceChoice:
        """Waits for the device, and for imports. Raises ConfigError as `detect` does."""
        self._threads.shutdown()
        return self._choice.result()

    def close(self) -> None:
        """Imports nothing more than what is being imported, which ends before the process does."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _import(self) -> None:
        for package in _GPU_PACKAGES:
            if not self._is_closed:
                with suppress(ImportError):  # raised again by who needs it
                    importlib.import_module(package)


def build_backend(
    plan: DecoderPlan,
    model: ModelConfig,
    engine: EngineConfig,
    lora: LoraConfig,
    trace: Trace | None = None,
    search: DeviceSearch | None = None,
) -> ServingBackend:
    """Returns a backend on the device of --device, with compiled kernels; its LoRA workers are not started.

    `search`: for this device, begun earlier. Raises ConfigError or ModelLoadError.
    """
    choice = (search or DeviceSearch(engine.device)).choice()
    if choice.note:
        log.warning("%s", choice.note)
    check_options(plan, model, engine, lora, choice.device)
    if note := frequencies_note(plan.ropes, context_tokens(plan, model)):
        log.info("%s", note)
    if plan.delta_nets and engine.enable_prefix_caching:
        log.info("KV blocks of equal prompt prefixes are not reused: this model has a state beside them")
    if choice.device == "cuda":
        prepare_environment()
        return build_cuda_backend(plan, model, engine, lora, trace)
    return _build_cpu_backend(plan, model, engine, lora, trace)


def check_options(plan: DecoderPlan, model: ModelConfig, engine: EngineConfig, lora: LoraConfig, device: str) -> None:
    """Raises ConfigError or ModelLoadError for options that this model on this device cannot be served with, as far as
    that shows before weights are read and kernels compiled."""
    if model.max_model_len is not None and model.max_model_len > plan.max_position:
        raise ConfigError(
            f"--max-model-len {model.max_model_len} is more than the model's {plan.max_position} positions"
        )
    dtype = dtype_of(plan, model.dtype)
    _lora_cpus(lora)
    if device == "cuda":
        if model.activations != "exact":
            raise ConfigError(
                f"--activations {model.activations} is for CPUs; GPUs compute with the weights as they are"
            )
        name = NAMES[dtype]
        if engine.kv_cache_dtype not in ("auto", name):
            raise ConfigError(
                f"--kv-cache-dtype {engine.kv_cache_dtype}: on a GPU keys and values have the dtype of the weights, "
                f"{name}; leave the option out, or give --dtype {engine.kv_cache_dtype}"
            )
        _check_cuda_options(plan, lora)
        return
    kv_cache_bytes(plan, context_tokens(plan, model), engine)


def _check_cuda_options(plan: DecoderPlan, lora: LoraConfig) -> None:
    from caraserve.gpu.supported_plans import check_plan

    check_plan(plan)
    if lora.mode.merges and plan.is_quantized:
        names = ", ".join(plan.quantized_formats)
        raise ConfigError(
            f"--loading-mode merged adds adapters to the weights, and those in {names} cannot hold the sum on a GPU; "
            "give another mode, or a checkpoint that is not quantised"
        )


def _build_cpu_backend(
    plan: DecoderPlan, model: ModelConfig, engine: EngineConfig, lora: LoraConfig, trace: Trace | None
) -> ServingBackend:
    from caraserve.cpu.jit import counting  # kernels are compiled after all checks

    kernels, rounds_rows = CompileProgress(), model.activations != "exact"
    with kernels.shown() as compiled, counting(compiled):
        from caraserve.cpu.backend import CpuBackend, CpuSizes
        from caraserve.cpu.kv_kernels import kv_kernels
        from caraserve.cpu.libc import return_freed_memory
        from caraserve.cpu.weights import compile_kernels, load_model, progress_steps

        compile_kernels(plan, rounds_rows=rounds_rows)
        kv_kernels(kv_cache_dtype(engine))
    dtype, context = dtype_of(plan, model.dtype), context_tokens(plan, model)
    kv_bytes, lora_cpus = kv_cache_bytes(plan, context, engine), _lora_cpus(lora)
    cores = len(os.sched_getaffinity(0))
    with progress("weights", progress_steps(plan)) as advance, _reader(model, plan, engine.seed, dtype) as read:
        loaded = load_model(
            plan, dtype, context, read, advance, rounds_rows=rounds_rows, threads=engine.cpu_threads or cores
        )
    seqs = engine.max_num_seqs or _CPU_SEQS
    sizes = CpuSizes(
        threads=engine.cpu_threads or _compute_threads(cores),
        num_slots=seqs,
        adapter_slots=ADAPTER_SLOTS,
        max_step_tokens=max(engine.max_num_batched_tokens or _CPU_STEP_TOKENS, seqs),
        max_context=context,
        kv_cache_bytes=kv_bytes,
        kv_dtype=kv_cache_dtype(engine),
        host_bytes=lora.max_host_adapters_bytes,
        lora_cpus=lora_cpus,
        padded=lora.lora_kernel == "bgmv-padded",
    )
    backend = CpuBackend(plan, loaded, sizes, trace)
    with kernels.shown() as compiled, counting(compiled):
        backend.warm_up(merging=lora.mode.merges)
    return_freed_memory()
    return backend


def compile_copies() -> CopyMatrices:
    """Returns the compiled code that reads adapters."""
    from caraserve.cpu.jit import counting

    with CompileProgress().shown() as compiled, counting(compiled):
        from caraserve.cpu.adapter_matrices import compiled_copies

        return compiled_copies()


@contextmanager
def _reader(model: ModelConfig, plan: DecoderPlan, seed: int, dtype: Dtype) -> Iterator[TensorReader]:
    """Yields a reader of the checkpoint, or of random weights in `dtype`. Raises ModelLoadError, also when a file has
    changed at the end."""
    from caraserve.cpu.weights import dummy_reader

    assert model.model is not None
    if model.load_format == "dummy":
        yield dummy_reader(seed, dtype)
        return
    with open_tensors(model.model, plan.stored_names) as read:
        yield read


def build_cuda_backend(
    plan: DecoderPlan, model: ModelConfig, engine: EngineConfig, lora: LoraConfig, trace: Trace | None
) -> ServingBackend:
    """Returns a backend on the first visible GPU, with captured graphs; its LoRA workers are not started."""
    from caraserve.gpu.backend import CudaBackend
    from caraserve.gpu.builder import GRAPH_BYTES, GpuSizes
    from caraserve.gpu.checkpoint import load_checkpoint
    from caraserve.gpu.kernels.cuda_kernels import open_device
    from caraserve.gpu.weights import TORCH_DTYPES, dummy, load, progress_steps

    assert model.model is not None
    dtype, context = dtype_of(plan, model.dtype), context_tokens(plan, model)
    seqs, lora_cpus = engine.max_num_seqs or _GPU_SEQS, _lora_cpus(lora)
    sys.setswitchinterval(_SWITCH_S)
    device = open_device(dtype)
    load_weights, transfer = partial(load, plan, TORCH_DTYPES[dtype], context), None
    with progress("weights", progress_steps(plan)) as advance:
        if model.load_format == "dummy":
            weights = load_weights(device.device, dummy(engine.seed, device.device), advance)
        else:
            weights, transfer = load_checkpoint(model.model, device, load_weights, advance, plan.stored_names)
    if transfer is not None:
        log.info("%s", transfer)
    sizes = GpuSizes(
        num_slots=seqs,
        adapter_slots=ADAPTER_SLOTS,
        max_step_tokens=max(engine.max_num_batched_tokens or _GPU_STEP_TOKENS, seqs),
        max_context=context,
        memory_utilization=engine.gpu_memory_utilization,
        host_bytes=lora.max_host_adapters_bytes,
        adapter_bytes=lora.lora_pool_bytes,
        graph_bytes=0 if engine.enforce_eager else GRAPH_BYTES,
        pool_bytes=engine.kv_cache_bytes,
        padded_rank=lora.padded_rank,
        merging=lora.mode.merges,
        lora_cpus=lora_cpus,
        averages=read_sentence_format(model.model).pooling == "mean",
    )
    backend = CudaBackend(plan, weights, sizes, device, trace)
    try:
        with progress("kernels", backend.warm_up_steps) as advance:
            backend.warm_up(advance)
    except Exception:  # not Ctrl-C, which must not wait for the warm-up
        backend.close()
        raise
    return backend


def dtype_of(plan: DecoderPlan, asked: str) -> Dtype:
    """Returns the dtype of --dtype, or the checkpoint's for `auto`. Raises ModelLoadError if it is not supported."""
    name = plan.dtype if asked == "auto" else asked
    if name not in DTYPES:
        raise ModelLoadError(f"config.json: dtype {name!r} is not supported; give --dtype {', '.join(DTYPES)}")
    return DTYPES[name]


def context_tokens(plan: DecoderPlan, model: ModelConfig) -> int:
    """Returns the most tokens of a request: --max-model-len, or the model's positions up to a default."""
    return min(plan.max_position, model.max_model_len or _DEFAULT_CONTEXT_TOKENS)


def _compute_threads(cores: int) -> int:
    """Returns the number of compute threads: one less than `cores`, which leaves a core for the event loop.

    Of two cores both are used: one would halve the speed, which costs more than the event loop's 99th percentile
    lateness of 2 to 3 ms instead of 0.6.
    """
    return cores if cores <= 2 else cores - 1


def _lora_cpus(lora: LoraConfig) -> tuple[int, ...]:
    """Returns the LoRA workers' cores: --lora-cpus, or all but the first, which is for the event loop.

    Returns none if the loading mode uses no workers. Raises ConfigError for cores that this process may not use.
    """
    if not lora.mode.uses_workers:
        return ()
    usable = sorted(os.sched_getaffinity(0))
    if lora.lora_cpus is None:
        return tuple(usable[1:] or usable)
    if missing := set(lora.lora_cpus) - set(usable):
        raise ConfigError(f"--lora-cpus names core {min(missing)}; this process may use {usable}")
    return lora.lora_cpus


def kv_cache_dtype(engine: EngineConfig) -> Dtype:
    """Returns the dtype of the CPU's KV cache."""
    return Dtype.F32 if engine.kv_cache_dtype == "auto" else DTYPES[engine.kv_cache_dtype]


def kv_cache_bytes(plan: DecoderPlan, context: int, engine: EngineConfig) -> int:
    """Returns the size of the CPU's KV cache. Raises ConfigError if one request of full length does not fit."""
    asked = engine.kv_cache_bytes
    least = plan.kv_bytes_per_token(kv_cache_dtype(engine).itemsize) * (context + 16)
    if asked is not None and asked < least:
        raise ConfigError(
            f"--kv-cache-bytes {asked} is too small: one request of {context} tokens needs {least} bytes "
            f"({human_bytes(least)}); raise it or lower --max-model-len"
        )
    return asked or max(least, min(_KV_MOST_BYTES, int(_KV_SHARE * free_bytes())))
