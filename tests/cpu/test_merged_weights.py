"""Compares weights with a merged adapter with numpy; they never contain another adapter's."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec, HostAdapter, aligned_bytes, lay_out
from caraserve.cpu import simd
from caraserve.cpu.adapters import CpuImage, DeviceAdapters
from caraserve.cpu.buffers import Buffers
from caraserve.cpu.jit import kernel
from caraserve.cpu.merged_weights import CpuMergedWeights
from caraserve.cpu.structs import SITE
from caraserve.cpu.thread_team import ThreadTeam
from caraserve.cpu.weight_memory import convert
from caraserve.cpu.weights import LoadedModel, dummy_reader, load_model
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.families import plan_of
from caraserve.model.formats import TensorReader, WeightFormat
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.scaled_codes import Inputs
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up
from tests.cpu.as_python import callable_from_python
from tests.plans.made_up import Tensors

DTYPES = (Dtype.F32, Dtype.BF16, Dtype.F16)
SPEC = plan_of(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 80,
        "intermediate_size": 272,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    }
)
LINEARS = SPEC.layers[0].linears
ALL = range(len(LINEARS))
SLOT = 2
SCALE = 1.25

Modules = dict[tuple[int, int], NDArray[np.float64]]


@dataclass
class Subject:
    """A base model, a device cache and merged weights."""

    loaded: LoadedModel
    dtype: Dtype
    adapters: DeviceAdapters
    buffers: Buffers
    lora: NDArray[np.void]
    team: ThreadTeam
    merged: CpuMergedWeights

    def model(self, slot: int = SLOT) -> NDArray[np.void]:
        return self.merged.with_adapter(slot, self.adapters, self.buffers.record, self.lora, self.team.run)

    def panels(self, model: NDArray[np.void], layer: int, site: int) -> NDArray[np.generic]:
        """Returns a module's stored weights, [out, in]."""
        at = int(model["site"][0]) + SITE.itemsize * (SPEC.most_sites * layer + site)
        record = np.frombuffer((ctypes.c_byte * SITE.itemsize).from_address(at), SITE)[0]
        inputs, outputs = LINEARS[site].inputs, LINEARS[site].outputs
        padded = inputs + inputs % 2
        count = align_up(outputs, PANEL) * padded
        kind = ctypes.c_float if self.dtype is Dtype.F32 else ctypes.c_uint16
        flat = np.ctypeslib.as_array((kind * count).from_address(int(record["weight"])))
        if self.dtype is Dtype.BF16:  # pairs, the later input first
            pairs = flat.reshape(-1, padded // 2, PANEL, 2)[..., ::-1].transpose(0, 2, 1, 3)
            return pairs.reshape(-1, padded)[:outputs, :inputs].copy()
        return flat.reshape(-1, inputs, PANEL).swapaxes(1, 2).reshape(-1, inputs)[:outputs].copy()


class Zeros(Tensors):
    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[NDArray[np.generic], Dtype]:
        return np.zeros(shape, np.float32), Dtype.F32


def subject(
    dtype: Dtype = Dtype.F32, threads: int = 2, *, plan: DecoderPlan = SPEC, read: TensorReader | None = None
) -> Subject:
    loaded = load_model(plan, dtype, 64, read or dummy_reader(0, dtype), lambda: None)
    adapters = DeviceAdapters(SPEC, 4)
    buffers = Buffers(SPEC, 8, 8, threads, 1 << 16, ())
    lora = buffers.lora_record(adapters.addresses())
    return Subject(loaded, dtype, adapters, buffers, lora, ThreadTeam(threads), CpuMergedWeights(loaded, threads))


def adapter(rank: int, dtype: Dtype, sites: Sequence[int] = ALL, layers: int = 2) -> tuple[CpuImage, Modules]:
    """Returns an image that has arrived, and what each module adds to the weights, [out, in]."""
    rng, deltas = np.random.default_rng(rank), {}
    spans, ends = lay_out(SPEC, dtype, {(layer, site): (rank, SCALE) for layer in range(layers) for site in sites})
    data = aligned_bytes(ends[-1])
    data[:] = 0
    for span in spans:
        inputs, outputs = LINEARS[span.site].inputs, LINEARS[span.site].outputs
        a = np.zeros((span.padded_rank, align_up(inputs, A_COLUMNS)), np.float32)
        b = np.zeros((span.padded_rank, align_up(outputs, PANEL)), np.float32)
        a[:rank, :inputs] = rng.standard_normal((rank, inputs)) / 8
        b[:rank, :outputs] = rng.standard_normal((rank, outputs)) / 8
        a = keep(a, dtype, data[span.a_offset :])
        b = keep(b.reshape(len(b), -1, PANEL).swapaxes(0, 1), dtype, data[span.b_offset :])
        b = b.swapaxes(0, 1).reshape(span.padded_rank, -1)
        deltas[span.layer, span.site] = SCALE * (b.T @ a)[:outputs, :inputs]
    spec = AdapterSpec(f"{rank} {dtype}", dtype, rank, tuple(SPEC.targets[site] for site in sites), ends, spans)
    image = CpuImage.empty(HostAdapter(spec, data))
    image.data[:] = data
    image.mark_arrived(len(SPEC.layers))
    return image, deltas


def keep(values: NDArray[np.float32], dtype: Dtype, at: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Writes values in the stored dtype; returns the exact values that the stored ones represent."""
    raw = np.ascontiguousarray(convert(np.ascontiguousarray(values), Dtype.F32, dtype))
    at[: raw.nbytes] = raw.reshape(-1).view(np.uint8)
    return to_float32(raw, dtype).astype(np.float64)


def check(here: Subject, deltas: Modules) -> None:
    """Checks that every module is the base's plus the adapter's, rounded once, and other modules equal the base's."""
    model = here.model()
    for layer in range(len(SPEC.layers)):
        for site in ALL:
            base, merged = here.panels(here.loaded.model, layer, site), here.panels(model, layer, site)
            delta = deltas.get((layer, site))
            if delta is None:
                assert base.tobytes() == merged.tobytes()
                continue
            check_rounded(merged, to_float32(base, here.dtype) + delta, here.dtype)


def check_rounded(merged: NDArray[np.generic], exact: NDArray[np.float64], dtype: Dtype) -> None:
    spacing = {Dtype.F32: 2**-22, Dtype.BF16: 2**-8, Dtype.F16: 2**-11}[dtype]
    error = np.abs(to_float32(merged, dtype) - exact)
    assert (error <= spacing * np.abs(exact) + 1e-6).all()


# Each two of the three values once.
PAIRS = [(dtype, lora, (1, 13, 64)[(i + j) % 3]) for i, dtype in enumerate(DTYPES) for j, lora in enumerate(DTYPES)]


@pytest.mark.parametrize(("dtype", "lora_dtype", "rank"), PAIRS)
def test_merged_weights_are_base_plus_adapter(dtype: Dtype, lora_dtype: Dtype, rank: int) -> None:
    here = subject(dtype)
    image, deltas = adapter(rank, lora_dtype)
    here.adapters.bind(SLOT, image)
    check(here, deltas)
    here.team.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_modules_that_the_adapter_lacks_equal_the_base(threads: int) -> None:
    here = subject(threads=threads)
    image, deltas = adapter(8, Dtype.F32, (1, 3, 6), layers=1)
    here.adapters.bind(SLOT, image)
    check(here, deltas)
    here.team.close()


def test_an_adapter_with_fewer_modules_leaves_nothing_of_the_previous_one() -> None:
    here = subject()
    here.adapters.bind(1, adapter(64, Dtype.F32)[0])
    here.model(1)
    image, deltas = adapter(8, Dtype.F32, (0,))
    here.adapters.bind(SLOT, image)
    check(here, deltas)
    here.team.close()


def test_the_merged_adapter_is_not_merged_again() -> None:
    here = subject()
    here.adapters.bind(SLOT, adapter(8, Dtype.F32)[0])
    here.model()
    here.model()
    assert here.merged.merges == 1
    here.team.close()


@pytest.mark.parametrize("unbound", [False, True])
def test_a_slot_that_is_bound_again_is_merged_again(unbound: bool) -> None:
    here = subject()
    here.adapters.bind(SLOT, adapter(64, Dtype.F32)[0])
    here.model()
    if unbound:
        here.adapters.unbind(SLOT)
    image, deltas = adapter(13, Dtype.F32)
    here.adapters.bind(SLOT, image)
    check(here, deltas)
    assert here.merged.merges == 2
    here.team.close()


@pytest.mark.parametrize("kind", [Fp8(Inputs.KEPT), Int8(Inputs.KEPT)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_codes_become_numbers_with_the_adapter_added(kind: WeightFormat, dtype: Dtype) -> None:
    layers = tuple(layer.with_linears(lambda one: replace(one, format=kind)) for layer in SPEC.layers)
    read = Tensors()
    here = subject(dtype, plan=replace(SPEC, layers=layers), read=read)
    image, deltas = adapter(13, Dtype.F32)
    here.adapters.bind(SLOT, image)
    model = here.model()
    for layer, site in deltas:
        linear = SPEC.layers[layer].linears[site]
        base = kind.values(kind.read(read, linear.module, (linear.outputs, linear.inputs)))
        check_rounded(here.panels(model, layer, site), base + deltas[layer, site], dtype)
    here.team.close()


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16])
@pytest.mark.parametrize("zero", [False, True])
def test_sums_are_rounded_to_the_nearest_weight_and_ties_to_the_even_one(dtype: Dtype, zero: bool) -> None:
    """The adapter's products are exact and of all magnitudes, including subnormals. With a base weight of 0, many of
    them lie halfway between two weights."""
    here = subject(dtype, threads=1, read=Zeros() if zero else None)
    spans, ends = lay_out(SPEC, Dtype.F32, {(0, 0): (1, 1.0)})
    data = aligned_bytes(ends[-1])
    data[:] = 0
    inputs, outputs = LINEARS[0].inputs, LINEARS[0].outputs
    rng = np.random.default_rng(0)
    exponents = np.arange(inputs) % 36 - 20  # exponents of what is added, from below the least fp16 to near the largest
    data[spans[0].a_offset :].view(np.float32)[:inputs] = 2.0 ** (exponents - 11)
    row = np.zeros(align_up(outputs, PANEL), np.float32)
    row[:outputs] = rng.integers(-2047, 2048, outputs)
    b = np.zeros((len(row) // PANEL, spans[0].padded_rank, PANEL), np.float32)
    b[:, 0] = row.reshape(-1, PANEL)
    data[spans[0].b_offset :].view(np.float32)[: b.size] = b.reshape(-1)
    image = CpuImage.empty(HostAdapter(AdapterSpec("d", Dtype.F32, 1, ("q_proj",), ends, spans), data))
    image.data[:] = data
    image.mark_arrived(len(SPEC.layers))
    here.adapters.bind(SLOT, image)
    added = np.outer(row[:outputs], 2.0 ** (exponents - 11)).astype(np.float32)
    base = to_float32(here.panels(here.loaded.model, 0, 0), dtype)
    expected = convert(base + added, Dtype.F32, dtype)
    assert here.panels(here.model(), 0, 0).tobytes() == expected.tobytes()
    here.team.close()


@pytest.mark.parametrize("converts", [False, True])
def test_fp16_weights_are_rounded_alike_with_and_without_f16c(monkeypatch: pytest.MonkeyPatch, converts: bool) -> None:
    """All fp16 numbers, the midpoints between neighbours, and the fp32 numbers next to those."""
    if not converts:
        monkeypatch.setattr(simd, "_CONVERTS_HALF", False)
    _, store = simd.weight_ops(simd.DTYPE_F16)
    vload = simd.vload

    @callable_from_python
    @kernel
    def narrow(x, count, y):  # type: ignore[no-untyped-def]
        for i in range(0, count, 16):
            store(y + 2 * i, vload(x + 4 * i))

    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    halfway = (exact + np.append(exact[1:], np.float32(65536))) / 2
    values = np.concatenate([exact, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, np.float32(1e9)), [1e9]])
    values = np.resize(np.concatenate([values, -values]).astype(np.float32), align_up(2 * len(values), 16))
    narrowed = np.zeros(len(values), np.uint16)
    narrow(values.ctypes.data, len(values), narrowed.ctypes.data)
    with np.errstate(over="ignore"):
        assert narrowed.tobytes() == values.astype(np.float16).tobytes()
