"""What the kernels between a decoder's products compute, in torch: the functions of `caraserve.gpu.kernels` and
attention by their definitions, on any device, of any dtype. Tests compare kernels with these in double precision, and
replace the kernels by them."""

import torch
from torch import Tensor

from caraserve.gpu.attention.base import LayerAttention
from caraserve.gpu.forward.batch import NO_TOKEN
from caraserve.gpu.kernels.delta_net import DeltaNetState, DeltaNetWeights
from caraserve.gpu.kernels.experts import ExpertRoom, ExpertWeights, Routing
from caraserve.gpu.kernels.heads import Heads, RopeTables
from caraserve.gpu.kernels.norms import NormWeights
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.model.plan import Activation


def embed(
    history: Tensor,
    weight: Tensor | None,
    tokens: TokenTables,
    hidden: Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
) -> None:
    for row in range(len(hidden)):
        slot, position = int(tokens.slot[row]), int(tokens.position[row])
        if position == NO_TOKEN:
            hidden[row] = 0.0
            continue
        token = int(history[slot, position])
        vector = hidden[row] if token < 0 or weight is None else weight[token]  # a vector is there already
        if token >= 0:
            vector = vector * scale
        hidden[row] = vector if positions is None else vector + positions[position]


def add_and_norm(
    hidden: Tensor,
    delta: Tensor | None,
    out: Tensor | None,
    pre: NormWeights | None,
    post: NormWeights | None = None,
    multiplier: float = 1.0,
    scalar: float = 1.0,
    rows: Tensor | None = None,
) -> None:
    named = list(range(len(hidden))) if rows is None else rows.tolist()
    at = [row for row in named if row != NO_TOKEN]
    if delta is not None:
        hidden[at] = ((hidden[at] + normed(delta[at], post) * multiplier) * scalar).to(hidden.dtype)
    elif scalar != 1.0:
        hidden[at] *= scalar
    if pre is not None and out is not None:
        out[[index for index, row in enumerate(named) if row != NO_TOKEN]] = normed(hidden[at], pre).to(out.dtype)


def norm_rows(x: Tensor, norm: NormWeights) -> None:
    x.copy_(normed(x, norm))


def normed(x: Tensor, norm: NormWeights | None) -> Tensor:
    """Norms the last axis."""
    if norm is None:
        return x
    x = x - x.mean(-1, keepdim=True) if norm.subtracts_mean else x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return x if norm.bias is None else x + norm.bias


def rotate_and_append(projected: Tensor, tokens: TokenTables, cache: PagedCache, heads: Heads) -> None:
    dim, block, rope, count = heads.head_dim, cache.keys.shape[1], heads.rope, len(projected)
    tokens = TokenTables(tokens.slot[:count], tokens.position[:count])  # which may be those of a larger batch

    def of(columns: int, count: int) -> Tensor:
        return projected[:, columns : columns + count * dim].unflatten(1, (count, dim))

    q, k, v = of(heads.q, heads.heads), of(heads.k, heads.kv_heads), of(heads.v, heads.kv_heads)
    values, queries, keys = _normed_heads(v, heads.v_norm), q, k
    if not heads.norm_after_rope:
        queries, keys = _normed_heads(queries, heads.q_norm), _normed_heads(keys, heads.k_norm)
    if rope is not None:
        queries, keys = _rotated(queries, tokens, rope), _rotated(keys, tokens, rope)
    if heads.norm_after_rope:
        queries, keys = _normed_heads(queries, heads.q_norm), _normed_heads(keys, heads.k_norm)
    if rope is not None and rope.growth is not None:
        queries = queries * rope.growth[tokens.position.long()][:, None, None]
    for row, (slot, position) in enumerate(zip(tokens.slot.tolist(), tokens.position.tolist(), strict=True)):
        if position != NO_TOKEN:
            place = int(cache.block_table[slot, position // block]), position % block
            cache.keys[place], cache.values[place] = keys[row], values[row]
            q[row] = queries[row]


def _normed_heads(x: Tensor, norm: NormWeights | None) -> Tensor:
    """Norms [tokens, heads, head dim]."""
    if norm is None or norm.scope != "row":
        return normed(x, norm)
    return normed(x.flatten(1), norm).view(x.shape)


def _rotated(x: Tensor, tokens: TokenTables, rope: RopeTables) -> Tensor:
    pairs, at = rope.cos.shape[1], tokens.position.long()
    cos, sin = rope.cos[at][:, None], rope.sin[at][:, None]
    low, high, rest = x.split([pairs, pairs, x.shape[2] - 2 * pairs], 2)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], 2)


def activate(gate: Tensor | None, up: Tensor, out: Tensor, kind: Activation, row_gate: Tensor | None = None) -> None:
    result = _activated(up, kind) if gate is None else _gated(gate, up, kind)
    out.copy_(result if row_gate is None else result * torch.sigmoid(row_gate))


def _gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    if kind == "clamped_swiglu":
        low = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * low * torch.sigmoid(1.702 * low)
    return _activated(gate, kind) * up


def _activated(x: Tensor, kind: Activation) -> Tensor:
    functions = torch.nn.functional
    if kind == "silu":
        return functions.silu(x)
    if kind == "relu2":
        return functions.relu(x).square()
    return functions.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def multiply_by_gate(attended: Tensor, gate: Tensor) -> None:
    attended.mul_(torch.sigmoid(gate))


def apply_experts(
    x: Tensor,
    logits: Tensor,
    position: Tensor,
    experts: ExpertWeights,
    room: ExpertRoom | None,
    out: Tensor,
    *,
    adds: bool,
) -> None:
    rows = (position[: len(x)] >= 0).nonzero().flatten().tolist()
    weights = x.new_zeros((len(x), experts.routing.experts))
    for row in rows:
        for expert, weight in chosen(logits[row].to(x.dtype), experts.routing):
            weights[row, expert] = weight
    total = torch.zeros_like(out)
    for expert in weights.any(0).nonzero().flatten().tolist():
        total[rows] += weights[rows, expert, None] * expert_output(experts, expert, x[rows])
    out.copy_(out + total if adds else total)


def apply_delta_net(
    projected: Tensor, mixed: Tensor, out: Tensor, tokens: TokenTables, state: DeltaNetState, net: DeltaNetWeights
) -> None:
    """Computes rows one token after another, as if each were a batch of its own."""
    keys, heads = net.key_heads * net.key_width, net.value_heads
    for row in range(len(projected)):
        slot, position = int(tokens.slot[row]), int(tokens.position[row])
        if position == NO_TOKEN:
            continue
        inputs, matrices = state.inputs[slot], state.matrices[slot]
        if position == 0:
            inputs.zero_()
            matrices.zero_()
        kept = len(inputs)
        x = projected[row, : net.channels]
        past = [inputs[(position - back) % kept] for back in range(net.convolution.shape[1] - 1, 0, -1)]
        total = (torch.stack([*past, x]).to(x.dtype) * net.convolution.T.to(x.dtype)).sum(0)
        inputs[position % kept] = x
        mixed[row] = torch.nn.functional.silu(total)
        q, k, v = mixed[row].split([keys, keys, net.channels - 2 * keys])
        q, k = (one.view(net.key_heads, -1).repeat_interleave(heads // net.key_heads, 0) for one in (q, k))
        q, k = (one / (one.square().sum(1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
        a, b = (projected[row, first : first + heads] for first in (net.a, net.b))
        decay = (net.negative_rate.to(a.dtype) * torch.nn.functional.softplus(a + net.step_bias)).exp()
        matrices *= decay[:, None, None]
        error = (v.view(heads, -1) - torch.einsum("hkv,hk->hv", matrices.to(k.dtype), k)) * b.sigmoid()[:, None]
        matrices += k[:, :, None] * error[:, None, :]
        result = torch.einsum("hkv,hk->hv", matrices.to(q.dtype), q) * net.key_width**-0.5
        z = projected[row, net.z : net.z + len(v)].view(heads, -1)
        out[row] = (normed(result, net.norm) * torch.nn.functional.silu(z)).flatten()


def expert_output(experts: ExpertWeights, expert: int, x: Tensor) -> Tensor:
    """Computes one expert's output for rows of x, in the dtype of x."""

    def product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        out = x @ weight[expert].to(x.dtype).T
        return out if bias is None else out + bias[expert].to(x.dtype)

    gate, up = product(experts.gate_up, experts.gate_up_bias, x).chunk(2, -1)
    return product(experts.down, experts.down_bias, _gated(gate, up, experts.activation))


def chosen(logits: Tensor, how: Routing) -> list[tuple[int, Tensor]]:
    """Returns the experts of one row, best first, and their weights."""
    scores = torch.sigmoid(logits) if how.scores == "sigmoid" else logits.softmax(-1)
    key = scores if how.correction is None else scores + how.correction
    if how.groups is not None:
        groups, kept, score = how.groups
        grouped = key.view(groups, -1)
        best = grouped.amax(1) if score == "max" else grouped.sort(1, descending=True)[0][:, :2].sum(1)
        dropped = best.sort(descending=True, stable=True)[1][kept:]
        key = grouped.index_fill(0, dropped, float("-inf")).flatten()
    order = key.sort(descending=True, stable=True)[1][: how.top_k]
    weights = scores[order]
    if how.normalise:
        weights = weights / (weights.sum() + (1e-20 if how.scores == "sigmoid" else 0.0))
    return list(zip(order.tolist(), weights * how.scale, strict=True))


def cap_logits(logits: Tensor, scale: float, cap: float | None) -> None:
    logits.copy_(_capped(logits * scale, cap))


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def attend(
    q: Tensor, cache: PagedCache, tokens: TokenTables, row: int, count: int, out: Tensor, how: LayerAttention
) -> None:
    """Computes attention of `count` tokens of one request, from a row on."""
    slot, position = int(tokens.slot[row]), int(tokens.position[row])
    block, kv_heads, dim = cache.keys.shape[1:]
    end = position + count
    blocks = cache.block_table[slot, : -(-end // block)].long()
    keys, values = (part[blocks].reshape(-1, kv_heads, dim)[:end] for part in (cache.keys, cache.values))
    queries = q[row : row + count].view(count, kv_heads, -1, dim)
    scores = torch.einsum("thgd,shd->hgts", queries, keys) * how.scale
    at, seen = torch.arange(position, end, device=q.device)[:, None], torch.arange(end, device=q.device)[None, :]
    if how.slopes is not None:
        scores = scores + how.slopes.view(kv_heads, -1, 1, 1) * (seen - at)
    scores = _capped(scores, how.cap).masked_fill((seen > at) | (seen <= at - how.window), float("-inf"))
    if how.sinks is not None:
        sinks = how.sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
    weights = scores.softmax(-1)[..., :end]
    # Masked values may be NaN.
    values = torch.where((seen > at - how.window).any(0)[:, None, None], values, 0.0)
    out[row : row + count] = torch.einsum("hgts,shd->thgd", weights, values).reshape(count, -1)
