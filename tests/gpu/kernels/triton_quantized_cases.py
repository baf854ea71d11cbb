"""Products with quantised weights; run by test_triton_cases.py in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor

from caraserve.gpu.kernels.quantized import dequantise, halve_rows, multiply, round_rows, scale_rows
from caraserve.model.dtype import Code
from tests.gpu.honest_dots import honest_dots
from tests.gpu_device.nearest_codes import nearest_codes

pytestmark = pytest.mark.usefixtures(honest_dots.__name__)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
TORCH_CODES = {Code.F8_E4M3: torch.float8_e4m3fn, Code.I8: torch.int8}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def hard_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Returns rows with zeros, numbers of many sizes, and numbers between two codes."""
    rows = (
        random(5, width, dtype=dtype) * torch.tensor([1.0, 1e-3, 300.0, 0.0, 1.0], dtype=dtype, device=DEVICE)[:, None]
    )
    rows[4] = (torch.arange(width, device=DEVICE) / 16 - 2).to(dtype)
    rows[0, : width // 2] *= 1e-3
    return rows


@pytest.mark.parametrize("code", TORCH_CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 1500])
def test_rows_are_rounded_to_the_nearest_codes_by_their_own_scales(width: int, dtype: torch.dtype, code: Code) -> None:
    x, scales = hard_rows(width, dtype), torch.empty(5, device=DEVICE)
    values = torch.empty(5, width, dtype=torch.float16, device=DEVICE)
    round_rows(x, values, scales, code)
    wanted, wanted_scales = nearest_codes(x, code)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.float(), wanted)
    codes = torch.empty(5, width, dtype=TORCH_CODES[code], device=DEVICE)
    numbers = torch.empty(5, width, device=DEVICE)
    assert round_rows(x, codes, scales, code)
    assert torch.equal(codes.float(), values.float())
    round_rows(x, numbers, scales, code, as_numbers=True)
    assert torch.equal(numbers, values * scales[:, None])


@pytest.mark.parametrize("code", TORCH_CODES)
def test_a_given_scale_serves_all_rows_and_what_exceeds_it_becomes_the_largest_code(code: Code) -> None:
    x, given = hard_rows(100, torch.bfloat16), torch.tensor([0.003], device=DEVICE)
    values, scales = torch.empty(5, 100, dtype=torch.float16, device=DEVICE), torch.full((5,), 7.0, device=DEVICE)
    assert not round_rows(x, values, scales, code, given)
    assert torch.equal(values.float(), nearest_codes(x, code, given)[0])
    assert values.max() == code.largest
    assert torch.all(scales == 7.0)
    if code is Code.I8:
        integers = torch.empty(5, 100, dtype=torch.int8, device=DEVICE)
        assert round_rows(x, integers, scales, code, given)
        assert torch.equal(integers.float(), values.float())
        assert torch.all(scales == 1.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter
@pytest.mark.parametrize("given", [None, 0.01])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float, given: float | None) -> None:
    x, scales = random(2, 40), torch.empty(2, device=DEVICE)
    x[1, 3] = bad
    static = None if given is None else torch.tensor([given], device=DEVICE)
    for dtype in (torch.float16, torch.float8_e4m3fn):
        values = torch.empty(2, 40, dtype=dtype, device=DEVICE)
        round_rows(x, values, scales, Code.F8_E4M3, static)
        assert bool(values[1, 3].isnan())
        assert bool(values[0].float().isfinite().all())
    integers = torch.empty(2, 40, dtype=torch.int8, device=DEVICE)
    assert round_rows(x, integers, scales, Code.I8, static)
    assert scales.isnan().tolist() == [False, True]


@pytest.mark.parametrize("code", TORCH_CODES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 48), (17, 80, 96), (70, 144, 272)])
def test_products_are_those_of_the_dequantised_weights(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, tolerance: float, code: Code
) -> None:
    """Also where the GPU has no instructions for fp8."""
    weight = random(outputs, inputs)
    values, scale = nearest_codes(weight, code)
    codes = values.to(TORCH_CODES[code])
    x, bias, x_scale = random(rows, inputs + 8, dtype=dtype)[:, :inputs], random(outputs, dtype=dtype), random(rows)
    plain = x.double() @ (codes.double() * scale.double()[:, None]).T
    out = torch.full((rows, outputs + 3), 7.0, dtype=dtype, device=DEVICE)
    for capability in (80, 90):
        multiply(x, codes.view(torch.int8), out[:, :outputs], scale, code, capability)
        torch.testing.assert_close(out[:, :outputs].double(), plain, atol=tolerance * 4, rtol=tolerance)
    multiply(x, codes.view(torch.int8), out[:, :outputs], scale, code, 90, x_scale, bias)
    wanted = plain * x_scale.double()[:, None] + bias.double()
    torch.testing.assert_close(out[:, :outputs].double(), wanted, atol=tolerance * 8, rtol=tolerance)
    assert torch.all(out[:, outputs:] == 7.0)


def test_the_value_of_every_fp8_code() -> None:
    """A code times 1 is its value, exactly, by instruction and by moved bits."""
    bits = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.int8)
    codes = torch.zeros(256, 16, dtype=torch.int8, device=DEVICE)
    codes[:, 0] = torch.where((bits & 127) == 127, 0, bits)  # all but NaN
    wanted = codes[:, 0].view(torch.float8_e4m3fn).float()
    one, scale = torch.ones(1, 16, device=DEVICE), torch.ones(256, device=DEVICE)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for capability in (80, 90):
            out = torch.empty(1, 256, device=DEVICE)
            multiply(one.to(dtype), codes, out, scale, Code.F8_E4M3, capability)
            assert torch.equal(out[0], wanted)


def test_a_rows_sums_do_not_depend_on_the_other_rows() -> None:
    weight, scale = (random(64, 96) * 30).to(torch.int8), random(64)
    x = random(70, 96, dtype=torch.bfloat16)
    alone, together = torch.empty(1, 64, device=DEVICE), torch.empty(70, 64, device=DEVICE)
    multiply(x[3:4], weight, alone, scale, Code.I8, 80)
    multiply(x, weight, together, scale, Code.I8, 80)
    torch.testing.assert_close(alone[0], together[3], atol=0.0, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_scale_rows(dtype: torch.dtype, tolerance: float) -> None:
    out, scale, x_scale, bias = random(3, 1500, dtype=dtype), random(1500), random(3), random(1500, dtype=dtype)
    wanted = out.double() * scale.double() * x_scale.double()[:, None] + bias.double()
    scale_rows(out, out, scale, x_scale, bias)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    sums = (random(3, 40) * 1e6).to(torch.int32)
    scale_rows(sums, out[:, :40], scale[:40] * 1e-6)
    torch.testing.assert_close(out[:, :40].double(), sums * scale[:40].double() * 1e-6, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out[:, 40:].double(), wanted[:, 40:], atol=tolerance, rtol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter
def test_rows_become_float16_by_powers_of_two_without_loss() -> None:
    """But for numbers far below the largest of their row. What is not finite is not hidden."""
    x = hard_rows(700, torch.bfloat16)
    x[0] *= 1e30
    x[1] *= 1e-30
    x[2, 5] = torch.inf
    wide = torch.empty(5, 708, dtype=torch.bfloat16, device=DEVICE)
    wide[:, :700] = x
    halves, scales = torch.empty(5, 700, dtype=torch.float16, device=DEVICE), torch.empty(5, device=DEVICE)
    halve_rows(wide[:, :700], halves, scales)
    assert bool((halves[2].float() * scales[2]).isnan().all())
    for row, scale, was in zip(halves.double(), scales.double(), x.double(), strict=True):
        if bool(was.isfinite().all()):
            assert float(scale.log2()) % 1 == 0
            assert float((row * scale - was).abs().max()) <= float(was.abs().max()) * 2.0**-39
            assert was.abs().max() == 0 or 2**14 <= float(row.abs().max()) < 2**15


@pytest.mark.parametrize("code", TORCH_CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_become_numbers_as_the_reference_has_them(dtype: torch.dtype, code: Code) -> None:
    """Also where the GPU has no instructions for fp8."""
    values, scale = nearest_codes(random(6, 2100), code)
    codes = values.to(TORCH_CODES[code])
    for capability in (80, 90):
        numbers = torch.empty(6, 2100, dtype=dtype, device=DEVICE)
        dequantise(codes.view(torch.int8), scale, numbers, code, capability)
        assert torch.equal(numbers, (values * scale[:, None]).to(dtype))
