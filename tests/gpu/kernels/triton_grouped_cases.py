"""Products with weights in grouped codes, and embeddings of them; run by test_triton_cases.py in Triton's interpreter,
or on a GPU."""

import pytest
import torch
from torch import Tensor

from caraserve.gpu.kernels.elementwise import embed
from caraserve.gpu.kernels.grouped import GroupedMatrix, dequantise, embed_grouped, multiply
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.linear.base import LinearLoader
from caraserve.gpu.linear.grouped import load_matrices
from caraserve.model.linear_plan import LinearPlan
from tests.gpu.honest_dots import honest_dots
from tests.gpu_device.grouped_codes import KINDS, MadeUp
from tests.plans.gpu import matrices_of
from tests.plans.made_up import Tensors

pytestmark = pytest.mark.usefixtures(honest_dots.__name__)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OUTPUTS, INPUTS = 24, 256


def on_device(
    kind: str, outputs: int = OUTPUTS, inputs: int = INPUTS, order: int | None = None
) -> tuple[GroupedMatrix, Tensor]:
    """Returns random weights as they are packed, and as numbers. `order`: seed of an order of the columns."""
    stored = MadeUp.of(kind, order)
    linear = LinearPlan.of_role("module", inputs, outputs, "out")
    loader = LinearLoader(F32, DEVICE, lambda name, target: None, matrices_of(Tensors()), torch.ones(1))
    (packed,) = load_matrices(loader, stored, (linear,))
    values = stored.values(stored.read(Tensors(), "module", (outputs, inputs)))
    return packed, torch.from_numpy(values).to(DEVICE)


def random(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def product(x: Tensor, weight: GroupedMatrix, bias: Tensor | None = None) -> Tensor:
    """Multiplies x, which is part of longer rows, into rows that are longer than the result."""
    rows, inputs = x.shape
    wide = torch.full((rows, inputs + 8), torch.nan, dtype=x.dtype, device=DEVICE)
    wide[:, :inputs] = x
    out = torch.full((rows, weight.outputs + 3), 7.0, dtype=x.dtype, device=DEVICE)
    multiply(wide[:, :inputs], weight, out[:, : weight.outputs], bias)
    assert torch.all(out[:, weight.outputs :] == 7.0)
    return out[:, : weight.outputs]


def numbers_of(weight: GroupedMatrix, dtype: torch.dtype) -> Tensor:
    numbers = torch.full((weight.outputs, weight.inputs), torch.nan, dtype=dtype, device=DEVICE)
    dequantise(weight, numbers)
    return numbers


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_that_of_the_reference_bit_by_bit(kind: str) -> None:
    """Rows of one 1 and zeros pick out weights, which 16 bits round once, whatever the number of rows."""
    weight, values = on_device(kind)
    for rows, dtype in ((64, F32), (7, F16), (64, BF16)):
        chosen = torch.eye(INPUTS, device=DEVICE)[rows // 2 :: INPUTS // rows][:rows]
        assert torch.equal(product(chosen.to(dtype), weight), (chosen @ values.T).to(dtype))
    for dtype in (F32, BF16):
        assert torch.equal(numbers_of(weight, dtype), values.to(dtype))


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "fp8-blocks"])
def test_products_are_those_of_the_numbers(kind: str, rows: int) -> None:
    weight, values = on_device(kind)
    bias = random(OUTPUTS)
    for dtype, tolerance in ((F32, 1e-5), (F16, 2e-3), (BF16, 1.6e-2)):
        x = random(rows, INPUTS, dtype=dtype)
        wanted = x.double() @ values.to(dtype).double().T + bias.to(dtype).double()
        torch.testing.assert_close(product(x, weight, bias.to(dtype)).double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("kind", "inputs"), [("Q4_0", 96), ("Q5_1", 96), ("NVFP4", 80), ("w8", 112), ("GPTQ", 272)])
def test_inputs_need_not_fill_a_tile_or_a_group(kind: str, inputs: int) -> None:
    weight, values = on_device(kind, 40, inputs)  # more than a tile of outputs
    assert torch.equal(numbers_of(weight, F32), values)
    assert torch.equal(numbers_of(weight.rows(slice(3, 14)), F32), values[3:14])
    for rows, dtype in ((2, F32), (17, F16), (70, F16)):
        x = random(rows, inputs, dtype=dtype)
        tolerance = 2e-5 if dtype is F32 else 4e-3
        wanted = (x.float() @ values.to(dtype).float().T).to(dtype)
        torch.testing.assert_close(product(x, weight), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["GPTQ", "GPTQ-8", "Q5_0"])
def test_inputs_are_gathered_if_columns_are_in_another_order(kind: str) -> None:
    weight, values = on_device(kind, order=1)
    ones = torch.eye(INPUTS, device=DEVICE)[::5]
    assert torch.equal(product(ones, weight), ones @ values.T)
    assert torch.equal(numbers_of(weight, F32), values)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_K", "Q6_K", "NVFP4", "IQ4_NL"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_embeddings_are_rows_of_the_numbers(kind: str, dtype: torch.dtype) -> None:
    """A row of no token is zeros, and where a vector is there already it stays."""
    inputs = 768 if "K" in kind else 544
    weight, values = on_device(kind, inputs=inputs)
    history = torch.tensor([[5, 23, -1], [0, 7, 0]], dtype=torch.int32, device=DEVICE)
    slot = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    position = torch.tensor([1, 0, -1, 2, 1], dtype=torch.int32, device=DEVICE)
    hidden, tokens = random(5, inputs, dtype=dtype), TokenTables(slot, position)
    vector, plain = hidden[3].clone(), hidden.clone()
    embed_grouped(history, weight, tokens, hidden)
    assert torch.equal(hidden[[0, 1, 4]], values[[23, 0, 7]].to(dtype))
    assert torch.all(hidden[2] == 0.0)
    assert torch.equal(hidden[3], vector)
    positions = random(3, inputs)
    embed(history, None, tokens, hidden, 2.5, positions)
    embed(history, values.to(dtype), tokens, plain, 2.5, positions)
    assert torch.equal(hidden, plain)
