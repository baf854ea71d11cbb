"""Compares gated delta nets with torch in double precision; run by test_triton_cases.py in Triton's interpreter, or on
a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from caraserve.gpu.kernels.delta_net import DeltaNetState, DeltaNetWeights, apply_delta_net
from caraserve.gpu.kernels.norms import NormWeights
from caraserve.gpu.kernels.paged_cache import TokenTables
from tests.gpu_device import plain_layers as plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCES = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}
SLOTS = 4
# rows of (slot, first position, tokens): one that begins, one that decodes, one that goes on, one of a slot used before
ROWS = [(2, 0, 5), (0, 7, 1), (3, 5, 2), (1, 0, 1)]


def random(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def net_of(key_heads: int, value_heads: int, key_width: int, value_width: int, kernel: int) -> DeltaNetWeights:
    channels = 2 * key_heads * key_width + value_heads * value_width
    z, a = channels + 3, channels + 3 + value_heads * value_width
    return DeltaNetWeights(
        *(key_heads, value_heads, key_width, value_width),
        *(z, a, a + value_heads),
        convolution=random(channels, kernel) / 2,
        negative_rate=-random(value_heads).exp(),
        step_bias=random(value_heads + 1)[1:],
        norm=NormWeights(1 + 0.3 * random(value_width), None, 1e-5, scope="head"),
    )


def state_of(net: DeltaNetWeights, dtype: torch.dtype) -> DeltaNetState:
    """Returns a state whose slots have held other requests; NaN must not reach one that begins."""
    inputs = random(SLOTS, max(1, net.convolution.shape[1] - 1), net.channels, dtype=dtype)
    matrices = random(SLOTS, net.value_heads, net.key_width, net.value_width)
    inputs[1], matrices[1] = torch.nan, torch.nan
    return DeltaNetState(inputs, matrices)


def tables_of(rows: list[tuple[int, int, int]], most: int) -> TokenTables:
    """Returns tables of `most` tokens, the last ones of no request."""
    slots = [slot for slot, _, tokens in rows for _ in range(tokens)]
    positions = [first + token for _, first, tokens in rows for token in range(tokens)]
    padding = most - len(slots)
    made = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (slots, positions)]
    return TokenTables(
        torch.nn.functional.pad(made[0], (0, padding)), torch.nn.functional.pad(made[1], (0, padding), value=-1)
    )


def rows_of(net: DeltaNetWeights, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    projected = random(count, net.b + net.value_heads + 5, dtype=dtype)
    out = torch.full((count, net.value_heads * net.value_width + 2), torch.nan, dtype=dtype, device=DEVICE)
    return projected, torch.empty((count, net.channels + 1), dtype=dtype, device=DEVICE)[:, :-1], out[:, :-2]


def copy_of(state: DeltaNetState) -> DeltaNetState:
    return DeltaNetState(state.inputs.clone(), state.matrices.clone())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("sizes", [(2, 6, 8, 12, 4), (1, 1, 20, 40, 3), (3, 3, 16, 8, 2), (1, 2, 5, 3, 1)])
def test_rows_continue_the_state_of_their_slots(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    if dtype is not F32 and sizes[4] != 4:
        return
    net, tokens = net_of(*sizes), tables_of(ROWS, 12)
    state, (projected, mixed, out) = state_of(net, dtype), rows_of(net, 10, dtype)
    double = DeltaNetState(state.inputs.double(), state.matrices.double())
    wanted = out.double()
    plain.apply_delta_net(projected.double(), mixed.double(), wanted, tokens, double, net)
    apply_delta_net(projected, mixed, out, tokens, state, net)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert out[9].isnan().all()  # of no token
    assert torch.isfinite(out[:9]).all()
    torch.testing.assert_close(state.matrices.double(), double.matrices, atol=tolerance, rtol=tolerance)
    kept = min(sizes[4] - 1, 1)  # a row of one token at position 0 leaves the others as they were
    torch.testing.assert_close(state.inputs[[0, 2, 3]].double(), double.inputs[[0, 2, 3]])
    torch.testing.assert_close(state.inputs[1, :kept].double(), double.inputs[1, :kept])


def test_a_request_in_pieces_beside_others_gets_the_same_bits() -> None:
    net = net_of(2, 4, 8, 12, 4)
    projected, mixed, out = rows_of(net, 9, F32)
    first = state_of(net, F32)
    whole, pieces = copy_of(first), copy_of(first)
    apply_delta_net(projected, mixed, out, tables_of([(2, 0, 9)], 9), whole, net)
    for start, tokens in ((0, 2), (2, 1), (3, 6)):
        part = slice(start, start + tokens)
        beside = torch.cat([projected[part], projected[:2]])
        got = torch.empty((tokens + 2, out.shape[1]), device=DEVICE)
        tables = tables_of([(2, start, tokens), (0, 5, 2)], tokens + 3)
        apply_delta_net(beside, torch.empty((tokens + 2, net.channels), device=DEVICE), got, tables, pieces, net)
        assert torch.equal(got[:tokens], out[part])
    assert torch.equal(pieces.matrices[2], whole.matrices[2])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, where the factor is 0
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_large_steps_forget_and_what_is_not_finite_is_not_hidden() -> None:
    net = net_of(1, 1, 8, 8, 2)
    net = replace(net, step_bias=torch.full((1,), 200.0, device=DEVICE))
    state, (projected, mixed, out) = state_of(net, F32), rows_of(net, 2, F32)
    projected[1, 2 * net.key_width] = torch.nan  # of v
    apply_delta_net(projected, mixed, out, tables_of([(0, 9, 1), (3, 9, 1)], 2), state, net)
    assert torch.isfinite(out[0]).all()
    assert torch.linalg.matrix_rank(state.matrices[0, 0]) == 1  # k eᵀ of this token is all that is left
    assert out[1].isnan().all()
