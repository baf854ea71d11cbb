"""Quantised weights have the values that the library of their format gives them, to the bit; others are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats import Array, WeightFormat
from caraserve.model.formats.awq import Awq
from caraserve.model.formats.bitsandbytes import EIGHT_BITS, FourBits
from caraserve.model.formats.gptq import Gptq
from caraserve.model.formats.grouped import GroupedFormat, Scale
from caraserve.model.formats.packed import NVFP4, PACKED_MXFP4, PackedIntegers
from caraserve.model.formats.scaled_codes import BlockCodes
from tests.model.tensors import Tensors


def gptq(bits: int, group: int = 32, **fields: Any) -> Gptq:
    return Gptq.of(bits, group, **({"symmetric": False, "zero_step": 1, "has_order": False} | fields))


FORMATS: dict[str, GroupedFormat] = {
    "gptq4": gptq(4, has_order=True),
    "gptq8": gptq(8, has_order=True),
    "awq": Awq.of(32),
    "fp8 blocks": BlockCodes.of(Code.F8_E4M3, 16, 32, ".weight_scale"),
    "nvfp4": NVFP4,
    "mxfp4": PACKED_MXFP4,
    "nf4 bfloat16 64": FourBits.of("nf4", Dtype.BF16),
    "nf4 nested bfloat16 64": FourBits.of("nf4", Dtype.BF16),
    "fp4 bfloat16 64": FourBits.of("fp4", Dtype.BF16),
    "fp4 nested bfloat16 64": FourBits.of("fp4", Dtype.BF16),
    "nf4 nested float16 48": FourBits.of("nf4", Dtype.F16),  # blocks go on in the next row
    "nf4 float32 64": FourBits.of("nf4", Dtype.F32),
    "int8": EIGHT_BITS,
    **{
        f"int{bits} {word}symmetric {strategy}": PackedIntegers.of(bits, group, Scale.BF16, symmetric=not word)
        for bits in (4, 8)
        for word in ("", "a")
        for strategy, group in (("group", 32), ("channel", 0))
    },
}
STATE = "up.weight.quant_state.bitsandbytes__nf4"


def _golden() -> dict[str, dict[str, Array]]:
    found: dict[str, dict[str, Array]] = {}
    with np.load(Path(__file__).parent / "golden" / "packed.npz") as stored:  # by golden/make_packed.py
        for key in stored.files:
            case, _, name = key.partition("/")
            found.setdefault(case, {})[name] = stored[key]
    return found


GOLDEN = _golden()


def tensors_of(case: str) -> dict[str, Array]:
    """Returns copies of a case's tensors."""
    return {name: array.copy() for name, array in GOLDEN[case].items() if name != "values"}


def values_of(form: WeightFormat, tensors: dict[str, Array], shape: tuple[int, int]) -> Array:
    return form.values(form.read(Tensors(tensors), "up", shape))


def test_every_golden_case_is_tested() -> None:
    assert GOLDEN.keys() == FORMATS.keys()


@pytest.mark.parametrize("case", FORMATS)
def test_values_are_those_of_the_library(case: str) -> None:
    wanted = GOLDEN[case]["values"]
    found = values_of(FORMATS[case], tensors_of(case), wanted.shape)
    if case == "int8":  # the library rounds twice: code · SCB, and that · (1 / 127)
        np.testing.assert_allclose(found, wanted, rtol=2e-7)
    else:
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("case", FORMATS)
def test_tensors_that_are_missing_or_of_another_shape_are_refused(case: str) -> None:
    form, shape = FORMATS[case], GOLDEN[case]["values"].shape
    optional = {"up.weight_shape", "up.weight_zero_point"} if " symmetric" in case else {"up.weight_shape"}
    for name in tensors_of(case).keys() - optional:
        tensors = tensors_of(case)
        del tensors[name]
        with pytest.raises(ModelLoadError, match=rf"{name} is missing|is missing, which desc_act"):
            values_of(form, tensors, shape)
        if name != STATE and "quant_state" not in name:
            tensors[name] = np.zeros((5, 7), GOLDEN[case][name].dtype)
            with pytest.raises(ModelLoadError, match=name):
                values_of(form, tensors, shape)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("gptq4", "up.scales"), ("awq", "up.scales"), ("int4 symmetric group", "up.weight_scale")),
        *(("fp8 blocks", "up.weight_scale"), ("nvfp4", "up.weight_global_scale"), ("int8", "up.SCB")),
        *(("nf4 bfloat16 64", "up.weight.absmax"), ("nf4 nested bfloat16 64", "up.weight.nested_absmax")),
    ],
)
def test_scales_with_which_weights_are_not_finite_are_refused(case: str, name: str) -> None:
    huge = 1e-37 if name.endswith("global_scale") else 3.4e38  # scales are divided by it
    for value, bits in ((np.nan, 0x7FC0), (np.inf, 0x7F80), (-np.inf, 0xFF80), (huge, 0x7F7F), (-huge, 0xFF7F)):
        tensors = tensors_of(case)
        flat = tensors[name].reshape(-1)
        if flat.dtype == np.float16 and np.isfinite(value):
            continue  # times any code it is finite in float32
        flat[0] = bits if flat.dtype == np.uint16 else value
        with pytest.raises(ModelLoadError, match=r"up\..*finite"):
            values_of(FORMATS[case], tensors, GOLDEN[case]["values"].shape)


def test_the_refusal_says_which_scales_are_computed() -> None:
    tensors = tensors_of("int8")
    tensors["up.SCB"][3] = 3.4e38  # times 128, for the code -128
    says = r"^tensor up\.SCB / 127 has a scale of 2\.677e\+36; finite ones up to 2\.658e\+36, with which no weight "
    with pytest.raises(ModelLoadError, match=says):
        values_of(EIGHT_BITS, tensors, (8, 64))


# --- GPTQ ---


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_version_two_are_stored_as_they_are(bits: int) -> None:
    """gptqmodel writes them by adding 1 to each of version 1, for the same weights."""
    tensors = tensors_of(f"gptq{bits}")
    stored = tensors["up.qzeros"].view(np.uint8)
    if bits == 4:
        stored &= 0x77  # so that no zero point is 16, which version 2 does not hold
    first = values_of(gptq(bits), tensors, (8, 64))
    stored += 0x11 if bits == 4 else 1
    second = values_of(gptq(bits, zero_step=0), tensors, (8, 64))
    np.testing.assert_array_equal(second, first)
    if bits == 8:
        np.testing.assert_array_equal(second, GOLDEN["gptq8"]["values"])


def test_without_a_tensor_for_them_groups_are_in_order() -> None:
    tensors = tensors_of("gptq4")
    tensors["up.g_idx"] = np.repeat(np.arange(2, dtype=np.int32), 32)
    matrix = gptq(4).read(Tensors(tensors), "up", (8, 64))
    assert matrix.order is None
    without = {name: tensor for name, tensor in tensors.items() if name != "up.g_idx"}
    np.testing.assert_array_equal(values_of(gptq(4), without, (8, 64)), gptq(4).values(matrix))


def test_one_group_for_all_inputs() -> None:
    tensors = tensors_of("gptq4")
    tensors |= {name: tensors[name][:1] for name in ("up.qzeros", "up.scales")}
    tensors["up.g_idx"][:] = 0
    matrix = gptq(4, 0).read(Tensors(tensors), "up", (8, 64))
    assert matrix.group == 64
    assert matrix.arrays["scale"].shape == (8, 1)


@pytest.mark.parametrize("groups", [[0] * 64, [0] * 33 + [1] * 31, [5] * 32 + [1] * 32, [-1] * 64])
def test_groups_of_other_sizes_are_refused(groups: list[int]) -> None:
    tensors = tensors_of("gptq4") | {"up.g_idx": np.array(groups, np.int32)}
    with pytest.raises(ModelLoadError, match=r"up\.g_idx does not give 32 inputs to each group"):
        values_of(gptq(4), tensors, (8, 64))


def test_symmetric_weights_have_the_middle_as_zero_point() -> None:
    tensors = tensors_of("gptq4") | {"up.qzeros": np.full((2, 1), 0x77777777, np.int32)}
    form = gptq(4, symmetric=True)
    np.testing.assert_array_equal(values_of(form, tensors, (8, 64)), values_of(gptq(4), tensors, (8, 64)))
    with pytest.raises(ModelLoadError, match=r"up\.qzeros has other zero points than 7, which sym"):
        values_of(form, tensors_of("gptq4"), (8, 64))
    without = {name: tensor for name, tensor in tensors.items() if name != "up.qzeros"}
    np.testing.assert_array_equal(values_of(form, without, (8, 64)), values_of(form, tensors, (8, 64)))


def test_a_zero_point_beyond_a_byte_is_refused() -> None:
    tensors = tensors_of("gptq8")
    tensors["up.qzeros"][0, 0] = -1
    with pytest.raises(ModelLoadError, match=r"up\.qzeros has a zero point of 256; those up to 255"):
        values_of(gptq(8), tensors, (8, 64))


def test_scales_that_their_type_does_not_hold_are_refused() -> None:
    tensors = tensors_of("gptq4")
    tensors["up.scales"] = tensors["up.scales"].astype(np.float32) * np.float32(1 + 2**-20)
    with pytest.raises(ModelLoadError, match=r"up\.scales has scales that float16 does not hold"):
        values_of(gptq(4), tensors, (8, 64))


# --- the others ---


def test_awq_scales_with_which_weights_overflow_are_refused() -> None:
    tensors = tensors_of("awq")
    tensors["up.scales"][0, 0] = 5000
    with pytest.raises(ModelLoadError, match=r"up\.scales has a scale of 5000; finite ones up to 4094"):
        values_of(Awq.of(32), tensors, (8, 64))


def test_columns_of_packed_integers_are_sorted_by_group() -> None:
    case = "int4 asymmetric group"
    form, tensors, order = FORMATS[case], tensors_of(case), np.random.default_rng(0).permutation(64)
    words = np.zeros((12, 64), np.uint8)
    codes = form.read(Tensors(tensors), "up", (12, 64)).arrays["codes"]
    words[:, order] = codes  # input order[i] has the codes and the group of column i
    packed = (words[:, ::2] | words[:, 1::2] << 4).view(np.int32)
    groups = np.empty(64, np.int32)
    groups[order] = np.arange(64) // 32
    moved = values_of(form, tensors | {"up.weight_packed": packed, "up.weight_g_idx": groups}, (12, 64))
    np.testing.assert_array_equal(moved[:, order], GOLDEN[case]["values"])
    unset = tensors | {"up.weight_g_idx": np.full(64, -1, np.int32)}
    np.testing.assert_array_equal(values_of(form, unset, (12, 64)), GOLDEN[case]["values"])


def test_scales_whose_products_with_zero_points_are_rounded_are_refused() -> None:
    tensors = tensors_of("int4 asymmetric group")
    form = PackedIntegers.of(4, 32, Scale.F32, symmetric=False)
    tensors["up.weight_scale"] = (tensors["up.weight_scale"].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(values_of(form, tensors, (12, 64)), GOLDEN["int4 asymmetric group"]["values"])
    tensors["up.weight_scale"][0, 0] = 0.1
    with pytest.raises(ModelLoadError, match="has scales of more than 16 bits beside zero points"):
        values_of(form, tensors, (12, 64))


def test_fp8_codes_without_a_value_are_refused() -> None:
    tensors = tensors_of("fp8 blocks")
    tensors["up.weight"][3, 4] = 0xFF
    with pytest.raises(ModelLoadError, match=r"up\.weight has weights that are not numbers"):
        values_of(FORMATS["fp8 blocks"], tensors, (29, 103))


def test_fp4_scales_that_are_no_numbers_are_refused() -> None:
    for case, value, says in (("nvfp4", 0x7F, "has a scale of nan"), ("mxfp4", 255, "has a scale of 255")):
        tensors = tensors_of(case)
        tensors["up.weight_scale"][1, 1] = value
        with pytest.raises(ModelLoadError, match=says):
            values_of(FORMATS[case], tensors, (8, 64))


# --- bitsandbytes ---

CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "table": (lambda state: state.update(quant_type="fp4"), "says quant_type 'fp4'; 'nf4' is read"),
    "block": (lambda state: state.update(blocksize=128), "says blocksize 128; 64 is read"),
    "shape": (lambda state: state.update(shape=[64, 8]), r"says shape \[64, 8\]; \[8, 64\] is read"),
    "dtype": (lambda state: state.update(dtype="float16"), "says dtype 'float16'; 'bfloat16' is read"),
    "nested block": (lambda state: state.update(nested_blocksize=1), "says nested_blocksize 1; 256 is read"),
    "not nested": (lambda state: state.pop("nested_blocksize"), "says nested_blocksize None; 256 is read"),
    "offset": (lambda state: state.update(nested_offset="0"), "nested_offset is '0'; a finite number is"),
    "no offset": (lambda state: state.update(nested_offset=10**400), "nested_offset is 1000+; a finite number is"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_is_not_as_read_is_refused(change: str) -> None:
    tensors = tensors_of("nf4 nested bfloat16 64")
    state = json.loads(tensors[STATE].tobytes())
    CHANGES[change][0](state)
    tensors[STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    with pytest.raises(ModelLoadError, match=CHANGES[change][1]):
        values_of(FORMATS["nf4 nested bfloat16 64"], tensors, (8, 64))


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff", b"[" * 4000, b" " * 5000])
def test_a_state_that_is_no_object_is_refused(text: bytes) -> None:
    tensors = tensors_of("nf4 bfloat16 64") | {STATE: np.frombuffer(text, np.uint8)}
    with pytest.raises(ModelLoadError, match=r"does not hold a JSON object|must be a text of at most 4096 bytes"):
        values_of(FORMATS["nf4 bfloat16 64"], tensors, (8, 64))


def test_another_table_is_refused() -> None:
    tensors = tensors_of("nf4 bfloat16 64")
    tensors["up.weight.quant_map"][3] = 0.5
    with pytest.raises(ModelLoadError, match=r"up\.weight\.quant_map is not the table of nf4"):
        values_of(FORMATS["nf4 bfloat16 64"], tensors, (8, 64))


def test_int8_rows_lie_one_after_another() -> None:
    tensors = tensors_of("int8")
    for layout in (0, 1):
        tensors["up.weight_format"] = np.array(layout, np.uint8)
        if layout:
            with pytest.raises(ModelLoadError, match=r"up\.weight_format is 1; 0"):
                values_of(EIGHT_BITS, tensors, (8, 64))
        else:
            values_of(EIGHT_BITS, tensors, (8, 64))


# --- all ---


@pytest.mark.parametrize("case", FORMATS)
def test_bytes_in_memory_are_those_of_the_arrays(case: str) -> None:
    form, (outputs, inputs) = FORMATS[case], GOLDEN[case]["values"].shape
    arrays = form.read(Tensors(tensors_of(case)), "up", (outputs, inputs)).arrays
    others = sum(array.nbytes for name, array in arrays.items() if name != "codes")
    wanted = outputs * -(-inputs * form.kind.bits // 8) + others
    if inputs != 48:  # the size of smaller groups is known when they are read
        assert form.num_bytes(inputs, outputs, 4) == wanted


@pytest.mark.parametrize("case", FORMATS)
def test_only_formats_of_experts_have_them_in_one_tensor(case: str) -> None:
    with pytest.raises(ModelLoadError, match="weights of all experts in one tensor are not supported"):
        FORMATS[case].read_stacked(Tensors({}), "experts", (2, 8, 64))
