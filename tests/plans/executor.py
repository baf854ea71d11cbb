"""Executes a DecoderPlan in numpy, in double precision: what every backend must compute.

Written from the definitions in `model/plan.py` alone: whole sequences, no cache, no batches.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import Dtype, rounded, to_float32
from caraserve.model.formats import TensorReader, WeightFormat
from caraserve.model.linear_plan import LinearPlan, Rows
from caraserve.model.plan import Attention, DecoderPlan, DeltaNet, ExpertTensor, Mlp, Moe, Norm, Rope

Floats = NDArray[np.float64]
_CLAMP = 7.0
_LENGTH_EPS = 1e-6  # of q and k in delta nets
CONTEXT = 128  # tokens of the longest request


class Executor:
    """One model. `deltas`: what adapters add to modules' weights, [outputs, inputs] by module name; `biases`: to their
    outputs. `kv_dtype`: what keys and values are rounded to."""

    def __init__(
        self,
        plan: DecoderPlan,
        read: TensorReader,
        deltas: Mapping[str, Floats] | None = None,
        biases: Mapping[str, Floats] | None = None,
        kv_dtype: Dtype = Dtype.F32,
    ) -> None:
        self._plan, self._read, self._deltas, self._biases = plan, read, deltas or {}, biases or {}
        self._kv_dtype = kv_dtype

    def logits(self, tokens: list[int]) -> Floats:
        """Returns the logits after each token, [tokens, vocabulary]."""
        plan, count = self._plan, len(tokens)
        shape = plan.vocab_size, plan.hidden
        embedding = self._matrix(plan.embed_format, plan.embed, shape)
        x = embedding[tokens] * plan.embed_scale
        if plan.positions is not None:
            x = x + self._tensor(plan.positions, (plan.max_position, plan.hidden))[:count]
        for index, layer in enumerate(plan.layers):
            first_rows = None
            for block in layer.blocks:
                rows = first_rows if block.reads_first_rows else self._norm(block.pre, x)
                assert rows is not None
                first_rows = rows if first_rows is None else first_rows
                x = x + self._norm(block.post, self._body(block.body, rows)) * block.multiplier
            if plan.layer_scalars:
                x = x * self._tensor(plan.layer_scalars[index], (1,))
        head = embedding if plan.head is None else self._matrix(plan.head_format, plan.head, shape)
        if plan.has_unit_head_rows:
            head = head / np.sqrt((head * head).sum(1, keepdims=True))
        logits = self._norm(plan.final, x) @ head.T
        if plan.head_bias is not None:
            logits = logits + self._tensor(plan.head_bias, shape[:1])
        return capped(logits * plan.logit_scale, plan.logit_cap)

    def _body(self, body: Any, rows: Floats) -> Floats:
        if isinstance(body, Attention):
            return self._attention(body, rows)
        if isinstance(body, Moe):
            return self._moe(body, rows)
        if isinstance(body, DeltaNet):
            return self._delta_net(body, rows)
        assert isinstance(body, Mlp)
        roles = self._project(body.linears, rows)
        if body.is_gated:
            return self._linear(body.out, gated(body.activation, roles["gate"], roles["up"]))
        return self._linear(body.out, activated(body.activation, roles["up"]))

    def _moe(self, body: Moe, rows: Floats) -> Floats:
        roles = self._project(body.linears, rows)
        chosen, weights = routed(body, roles["router"], self._optional(body.correction, (body.experts,)))
        out = np.zeros_like(rows)
        for expert in range(body.experts):
            tokens, places = np.nonzero(chosen == expert)
            if len(tokens):
                gate, up = (self._expert(body, one, expert, rows[tokens]) for one in (body.gate, body.up))
                done = self._expert(body, body.down, expert, gated(body.activation, gate, up))
                out[tokens] += weights[tokens, places][:, None] * done
        if body.out is None:
            return out
        inner = gated(body.activation, roles["gate"], roles["up"])
        return out + self._linear(body.out, inner * sigmoid(roles["shared_gate"]) if "shared_gate" in roles else inner)

    def _expert(self, body: Moe, one: ExpertTensor, expert: int, x: Floats) -> Floats:
        """Returns one matrix of an expert times rows, and its bias."""
        stored = one.stored_outputs or one.outputs
        shape = (one.inputs, stored) if one.is_transposed else (stored, one.inputs)
        if "{expert}" in one.tensor:
            weight = self._matrix(one.format, one.tensor.format(expert=expert), shape)
        else:
            of_all = one.format.read_stacked(self._read, one.tensor, (body.experts, *shape))
            weight = one.format.values(of_all)[expert].astype(np.float64)
        weight = weight.T if one.is_transposed else weight
        rows = range(stored) if one.rows is None else one.rows
        out = x @ weight[list(rows)].T
        return out if one.bias is None else out + self._of_expert(body, one.bias, expert, (stored,))[list(rows)]

    def _of_expert(self, body: Moe, name: str, expert: int, shape: tuple[int, ...]) -> Floats:
        if "{expert}" in name:
            return self._tensor(name.format(expert=expert), shape)
        return self._tensor(name, (body.experts, *shape))[expert]

    def _optional(self, name: str | None, shape: tuple[int, ...]) -> Floats | float:
        return 0.0 if name is None else self._tensor(name, shape)

    def _attention(self, body: Attention, rows: Floats) -> Floats:
        count, dim = len(rows), body.head_dim
        roles = self._project(body.linears, rows)
        q = roles["q"].reshape(count, body.heads, dim)
        k = roles["k"].reshape(count, body.kv_heads, dim)
        v = self._norm(body.v_norm, roles["v"].reshape(k.shape) if "v" in roles else k)
        if not body.norm_after_rope:
            q, k = self._norm(body.q_norm, q), self._norm(body.k_norm, k)
        if body.rope is not None:
            q, k = rotated(q, body.rope), rotated(k, body.rope)
        if body.norm_after_rope:
            q, k = self._norm(body.q_norm, q), self._norm(body.k_norm, k)
        positions = np.arange(count)
        if body.rope is not None and body.rope.q_growth is not None:
            beta, length = body.rope.q_growth
            q = q * (1 + beta * np.log(1 + positions // length))[:, None, None]
        if self._kv_dtype is not Dtype.F32:
            k, v = (to_float32(rounded(one.astype(np.float32), self._kv_dtype), self._kv_dtype) for one in (k, v))
        k, v = (np.repeat(one, body.heads // body.kv_heads, axis=1) for one in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * body.scale
        distance = positions[None, :] - positions[:, None]  # of a key from a query
        if body.alibi:
            scores = scores + alibi_slopes(body.heads)[:, None, None] * distance
        scores = capped(scores, body.cap)
        seen = (distance <= 0) & (distance > -(body.window or count))
        scores = np.where(seen, scores, -np.inf)
        if body.sinks is not None:
            sinks = self._tensor(body.sinks, (body.heads,))
            scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (body.heads, count, 1))], axis=2)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights = (weights / weights.sum(axis=2, keepdims=True))[:, :, :count]
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        return self._linear(body.out, out * sigmoid(roles["gate"]) if body.gated else out)

    def _delta_net(self, body: DeltaNet, rows: Floats) -> Floats:
        count, roles = len(rows), self._project(body.linears, rows)
        mixed = np.concatenate([roles[role] for role in "qkv"], axis=1)
        before = np.concatenate([np.zeros((body.kernel - 1, mixed.shape[1])), mixed])
        weight = self._tensor(body.convolution, (mixed.shape[1], 1, body.kernel))[:, 0]
        mixed = activated("silu", sum(before[tap : tap + count] * weight[:, tap] for tap in range(body.kernel)))
        keys, shared = body.key_heads * body.key_width, body.value_heads // body.key_heads
        q, k, v = np.split(mixed, [keys, 2 * keys], axis=1)
        q, k = (one.reshape(count, body.key_heads, body.key_width) for one in (q, k))
        q, k = (one / np.sqrt((one * one).sum(2, keepdims=True) + _LENGTH_EPS) for one in (q, k))
        q, k = (np.repeat(one, shared, axis=1) for one in (q / math.sqrt(body.key_width), k))
        v, z = (one.reshape(count, body.value_heads, body.value_width) for one in (v, roles["z"]))
        log_decay, step_bias = (self._tensor(name, (body.value_heads,)) for name in (body.log_decay, body.step_bias))
        rates = log_decay if body.stores_rates else -np.exp(log_decay)
        decay = np.exp(rates * np.log1p(np.exp(roles["a"] + step_bias)))
        state, out = np.zeros((body.value_heads, body.key_width, body.value_width)), np.zeros(v.shape)
        for token in range(count):
            state = state * decay[token][:, None, None]
            error = (v[token] - np.einsum("hkv,hk->hv", state, k[token])) * sigmoid(roles["b"][token])[:, None]
            state = state + k[token][:, :, None] * error[:, None, :]
            out[token] = np.einsum("hkv,hk->hv", state, q[token])
        return self._linear(body.out, (self._norm(body.norm, out) * activated("silu", z)).reshape(count, -1))

    def _project(self, linears: tuple[LinearPlan, ...], rows: Floats) -> dict[str, Floats]:
        roles = {}
        for linear in linears:
            outputs = self._linear(linear, rows)
            roles |= {part.role: outputs[:, index(part.rows)] for part in linear.parts}
        return roles

    def _linear(self, linear: LinearPlan, rows: Floats) -> Floats:
        shape = (linear.inputs, linear.outputs) if linear.transposed else (linear.outputs, linear.inputs)
        weight = self._matrix(linear.format, f"{linear.module}.weight", shape)
        weight = (weight.T if linear.transposed else weight) + self._deltas.get(linear.module, 0.0)
        outputs = rows @ weight.T + self._biases.get(linear.module, 0.0)
        return outputs + self._tensor(f"{linear.module}.bias", (linear.outputs,)) if linear.bias else outputs

    def _norm(self, norm: Norm | None, x: Floats) -> Floats:
        """Normalises rows, [tokens, width], or heads, [tokens, heads, width]."""
        if norm is None:
            return x
        rows = x.reshape(len(x), -1) if norm.scope == "row" else x
        shape = {"row": rows.shape[-1:], "head": x.shape[-1:], "heads": x.shape[1:]}[norm.scope]
        if norm.kind == "layer":
            rows = rows - rows.mean(-1, keepdims=True)
        rows = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + norm.eps)
        order = slice(None) if norm.order is None else index(norm.order)

        def ordered(name: str) -> Floats:
            if "{head}" in name:
                values = np.stack([self._tensor(name.format(head=head), shape[1:]) for head in range(shape[0])])
            else:
                values = self._tensor(name, shape)
            return values.reshape(-1)[order].reshape(shape)

        if norm.weight is not None:
            rows = rows * (ordered(norm.weight) + norm.offset)
        if norm.bias is not None:
            rows = rows + ordered(norm.bias)
        return rows.reshape(x.shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Floats:
        return to_float32(*self._read(name, shape)).astype(np.float64)

    def _matrix(self, kind: WeightFormat, name: str, shape: tuple[int, int]) -> Floats:
        return kind.values(kind.read(self._read, name.removesuffix(".weight"), shape)).astype(np.float64)


def routed(body: Moe, logits: Floats, correction: Floats | float) -> tuple[NDArray[np.intp], Floats]:
    """Returns the chosen experts of each token and their weights, [tokens, top_k] each."""
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    scores = sigmoid(logits) if body.scores == "sigmoid" else exponents / exponents.sum(-1, keepdims=True)
    for_choice = scores + correction
    if body.groups is not None:
        groups, kept, how = body.groups
        grouped = for_choice.reshape(len(logits), groups, -1)
        of_groups = grouped.max(-1) if how == "max" else np.sort(grouped, -1)[..., -2:].sum(-1)
        is_kept = np.argsort(np.argsort(-of_groups, -1, kind="stable"), -1) < kept
        for_choice = np.where(is_kept[:, :, None], grouped, -np.inf).reshape(logits.shape)
    chosen = np.argsort(-for_choice, -1, kind="stable")[:, : body.top_k]
    weights = np.take_along_axis(scores, chosen, -1)
    if body.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + (1e-20 if body.scores == "sigmoid" else 0.0))
    return chosen, weights * body.scale


def rotated(x: Floats, rope: Rope) -> Floats:
    """Rotates pairs of dimensions of heads, [positions, heads, width]."""
    frequencies = rope.long_frequencies if rope.long_frequencies and rope.longest_short < CONTEXT else rope.frequencies
    pairs = len(frequencies)
    angles = np.arange(len(x))[:, None, None] * np.array(frequencies)
    cos, sin = np.cos(angles) * rope.factor, np.sin(angles) * rope.factor
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def capped(x: Floats, cap: float | None) -> Floats:
    return x if cap is None else cap * np.tanh(x / cap)


def sigmoid(x: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(x / 2))


def activated(kind: str, x: Floats) -> Floats:
    if kind == "silu":
        return x * sigmoid(x)
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    assert kind == "relu2"
    return np.maximum(x, 0) ** 2


def gated(kind: str, gate: Floats, up: Floats) -> Floats:
    if kind != "clamped_swiglu":
        return activated(kind, gate) * up
    gate, up = np.minimum(gate, _CLAMP), np.clip(up, -_CLAMP, _CLAMP)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def alibi_slopes(heads: int) -> Floats:
    """Returns the slope of each head, as the paper's code computes them."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]
    return np.array(slopes)


def index(rows: Rows) -> list[int]:
    return list(rows)
