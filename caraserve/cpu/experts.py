"""The kernels of a mixture of experts: routing, and the experts' MLPs over the rows that chose them.

Rows are gathered by expert, so that the weights of an expert are read once in an iteration. Work is dealt as panels of
single experts, which threads claim in order: one token with eight experts keeps a team as busy as two thousand tokens.
A token's result does not depend on the others: its router's sums, its choice, the products of its rows and the order in
which its experts are added up are the same in any batch and with any team.
"""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.barrier import meet
from caraserve.cpu.jit import compiled_separately, kernel
from caraserve.cpu.kernels import STORE
from caraserve.cpu.layers import activate, sigmoid
from caraserve.cpu.products import prepare_rows, project_panels
from caraserve.cpu.simd import (
    LANES,
    fetch_add,
    keep_below,
    load_f32,
    store_f32,
    store_i64,
    vadd,
    vdiv,
    vexp,
    vfma,
    vload,
    vmax,
    vmaximum,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from caraserve.cpu.structs import (
    NO_COLUMN,
    SITE,
    batch_at,
    buffers_at,
    mlp_at,
    model_at,
    moe_at,
    routed_at,
    word,
)

_SITE_BYTES = np.int64(SITE.itemsize)
_GATE, _DOWN, _SITES = (np.int64(number) for number in (0, 2, 3))  # of an expert: gate, up, down
_NONE, _SMALLEST = np.float32(-np.inf), np.float32(1e-20)  # of a sum of sigmoids, which may all be 0
COUNTER_BYTES = 64  # a cache line for each counter of ROUTED


# --- routing ---


@kernel
def _score(moe, logits):  # type: ignore[no-untyped-def]
    """Turns a token's logits into scores in place: sigmoids, or a softmax over the experts."""
    count = moe.experts
    if moe.takes_sigmoids:
        for lane in range(0, count, LANES):
            vstore(logits + 4 * lane, sigmoid(vload(logits + 4 * lane)))
        return
    most, total = vsplat(_NONE), vsplat(np.float32(0.0))
    for lane in range(0, count, LANES):
        most = vmax(most, keep_below(vload(logits + 4 * lane), count - lane))
    top = vsplat(vmaximum(most))
    for lane in range(0, count, LANES):
        value = vexp(vsub(keep_below(vload(logits + 4 * lane), count - lane), top))
        vstore(logits + 4 * lane, value)
        total = vadd(total, value)
    by = vsplat(vsum(total))
    for lane in range(0, count, LANES):
        vstore(logits + 4 * lane, vdiv(vload(logits + 4 * lane), by))


@kernel
def _keep_groups(moe, choice, of_groups):  # type: ignore[no-untyped-def]
    """Sets the values of experts outside the best groups to -inf: those than which `kept_groups` others are better."""
    groups, size = moe.groups, moe.experts // moe.groups
    for group in range(groups):
        best, second = _NONE, _NONE
        for index in range(group * size, (group + 1) * size):
            value = load_f32(choice + 4 * index)
            if value > best:
                best, second = value, best
            elif value > second:
                second = value
        store_f32(of_groups + 4 * group, best + second if moe.adds_second else best)
    for group in range(groups):
        own, better = load_f32(of_groups + 4 * group), 0
        for other in range(groups):
            value = load_f32(of_groups + 4 * other)
            if value > own or (value == own and other < group):
                better += 1
        if better >= moe.kept_groups:
            for index in range(group * size, (group + 1) * size):
                store_f32(choice + 4 * index, _NONE)


@kernel
def _choose(moe, scores, choice, chosen, weights):  # type: ignore[no-untyped-def]
    """Writes the experts of a token, best first and of equal ones the lower, and their weights. `choice`: scratch.

    NaN never wins, and then the first expert may be chosen again: the token's result is NaN in any case."""
    for index in range(moe.experts):
        value = load_f32(scores + 4 * index)
        if moe.correction != 0:
            value += load_f32(moe.correction + 4 * index)
        store_f32(choice + 4 * index, value)
    if moe.groups != 0:
        _keep_groups(moe, choice, choice + 4 * moe.experts)
    total = np.float32(0.0)
    for rank in range(moe.top_k):
        best = np.int64(0)
        for index in range(1, moe.experts):
            if load_f32(choice + 4 * index) > load_f32(choice + 4 * best):
                best = np.int64(index)
        store_f32(choice + 4 * best, _NONE)
        store_i64(chosen + 8 * rank, best)
        weight = load_f32(scores + 4 * best)
        store_f32(weights + 4 * rank, weight)
        total += weight
    if moe.takes_sigmoids:
        total += _SMALLEST
    for rank in range(moe.top_k):
        weight = load_f32(weights + 4 * rank)
        if moe.normalises:
            weight /= total
        store_f32(weights + 4 * rank, weight * moe.scale)


@kernel
def _activate_shared(moe, rows, row_bytes, tokens, panel):  # type: ignore[no-untyped-def]
    """Computes the activation of a panel of the shared expert, times σ(shared_gate): its down has no bias, so that the
    factor may come before it."""
    mlp = mlp_at(moe.shared)
    activate(mlp, rows, row_bytes, tokens, panel)
    if moe.shared_gate == NO_COLUMN:
        return
    for token in range(tokens):
        row = rows + token * row_bytes
        factor, at = sigmoid(vsplat(load_f32(row + moe.shared_gate))), row + mlp.gate + 4 * PANEL * panel
        for lane in range(0, 4 * PANEL, 4 * LANES):
            vstore(at + lane, vmul(vload(at + lane), factor))


@kernel
def _sort(moe, routed, tokens):  # type: ignore[no-untyped-def]
    """Gives every chosen expert of every token a row, ordered by expert and then by token, and lists the experts that
    have any."""
    pairs = tokens * moe.top_k
    for expert in range(moe.experts + 1):
        store_i64(routed.first + 8 * expert, 0)
    for pair in range(pairs):
        at = routed.first + 8 * (word(routed.chosen, pair) + 1)
        store_i64(at, word(at, 0) + 1)
    active = np.int64(0)
    for expert in range(moe.experts):
        start, rows = word(routed.first, expert), word(routed.first, expert + 1)
        if rows > 0:
            store_i64(routed.active + 8 * active, expert)
            active += 1
        store_i64(routed.first + 8 * (expert + 1), start + rows)
        store_i64(routed.next + 8 * expert, start)
    for pair in range(pairs):
        at = routed.next + 8 * word(routed.chosen, pair)
        row = word(at, 0)
        store_i64(routed.row + 8 * pair, row)
        store_i64(at, row + 1)
    store_i64(routed.counters, active)
    store_i64(routed.counters + COUNTER_BYTES, 0)
    store_i64(routed.counters + 2 * COUNTER_BYTES, 0)


@compiled_separately(6)
def route(thread, team, buffers_address, batch_address, body_address, row_bytes):  # type: ignore[no-untyped-def]
    """Chooses the experts of all tokens from the router's outputs in `projected`, and computes the activation of the
    shared expert there. Ends before a barrier, as member 0 still sorts rows."""
    buffers, batch, moe = buffers_at(buffers_address), batch_at(batch_address), moe_at(body_address)
    routed, rows = routed_at(buffers.routed), buffers.projected
    choice = buffers.scratch + thread * buffers.scratch_bytes
    for token in range(thread, batch.tokens, team):
        scores, pair = rows + token * row_bytes + moe.router, token * moe.top_k
        _score(moe, scores)
        _choose(moe, scores, choice, routed.chosen + 8 * pair, routed.weight + 4 * pair)
    if moe.shared != 0:
        panels = mlp_at(moe.shared).panels
        for panel in range(thread * panels // team, (thread + 1) * panels // team):
            _activate_shared(moe, rows, row_bytes, batch.tokens, panel)
    meet(buffers.barrier, team)
    if thread == 0:
        _sort(moe, routed, batch.tokens)


# --- experts ---


@kernel
def _copy(x, width, y):  # type: ignore[no-untyped-def]
    """Copies x[width], a whole number of vectors, to y."""
    for lane in range(0, 4 * width, 4 * LANES):
        vstore(y + lane, vload(x + lane))


@kernel
def _expert_site(moe, expert, which):  # type: ignore[no-untyped-def]
    """Returns the address of an expert's SITE record: gate (0), up (1) or down (2)."""
    return moe.site + _SITE_BYTES * (_SITES * expert + which)


@kernel
def _prepare(moe, buffers, expert, first, end, x, row):  # type: ignore[no-untyped-def]
    """Prepares what row number `row` reads, x, for the sites [first, end) of an expert."""
    stride = buffers.prepared_bytes
    prepare_rows(_expert_site(moe, expert, first), end - first, x, 0, 1, buffers.prepared + row * stride, stride)


@kernel
def _gate_up(moe, buffers, routed, stride, expert, panel):  # type: ignore[no-untyped-def]
    """Computes a panel of an expert's gate and up, and its activation, for the rows of the expert."""
    own, first = mlp_at(moe.own), word(routed.first, expert)
    rows, row_bytes = word(routed.first, expert + 1) - first, 2 * own.up
    x, y = routed.rows + first * stride, routed.inner + first * row_bytes
    read = x, stride, buffers.prepared + first * buffers.prepared_bytes, buffers.prepared_bytes, rows
    project_panels(_expert_site(moe, expert, 0), *read, panel, panel + 1, y + own.gate, row_bytes, STORE)
    project_panels(_expert_site(moe, expert, 1), *read, panel, panel + 1, y + own.up, row_bytes, STORE)
    activate(own, y, row_bytes, rows, panel)


@kernel
def _down(moe, buffers, routed, stride, expert, panel):  # type: ignore[no-untyped-def]
    """Computes a panel of an expert's down in place of what its rows read."""
    own, first = mlp_at(moe.own), word(routed.first, expert)
    rows, row_bytes = word(routed.first, expert + 1) - first, 2 * own.up
    x, y = routed.inner + first * row_bytes + own.gate, routed.rows + first * stride
    read = x, row_bytes, buffers.prepared + first * buffers.prepared_bytes, buffers.prepared_bytes, rows
    project_panels(_expert_site(moe, expert, 2), *read, panel, panel + 1, y, stride, STORE)


@kernel
def _add_up(moe, routed, token, width, y, add):  # type: ignore[no-untyped-def]
    """Computes `y[width] (+)= Σ weight · output` over the token's experts, best first."""
    pair = token * moe.top_k
    for lane in range(0, 4 * width, 4 * LANES):
        total = vload(y + lane) if add else vsplat(np.float32(0.0))
        for rank in range(pair, pair + moe.top_k):
            at = routed.rows + 4 * width * word(routed.row, rank) + lane
            total = vfma(vsplat(load_f32(routed.weight + 4 * rank)), vload(at), total)
        vstore(y + lane, total)


@compiled_separately(8)
def mix(thread, team, model_address, buffers_address, batch_address, body_address, y, add):  # type: ignore[no-untyped-def]
    """Computes the chosen experts of all tokens, and stores the weighted sums to the rows at `y` or adds them there."""
    model, buffers, batch = model_at(model_address), buffers_at(buffers_address), batch_at(batch_address)
    moe, width = moe_at(body_address), model.hidden_pad
    routed, stride = routed_at(buffers.routed), 4 * width
    for token in range(thread, batch.tokens, team):
        for pair in range(token * moe.top_k, (token + 1) * moe.top_k):
            row, x = word(routed.row, pair), buffers.normed + token * stride
            _copy(x, width, routed.rows + stride * row)
            _prepare(moe, buffers, word(routed.chosen, pair), _GATE, _DOWN, x, row)
    meet(buffers.barrier, team)
    active, panels = word(routed.counters, 0), mlp_at(moe.own).panels
    item = fetch_add(routed.counters + COUNTER_BYTES, 1)
    while item < active * panels:
        _gate_up(moe, buffers, routed, stride, word(routed.active, item // panels), item % panels)
        item = fetch_add(routed.counters + COUNTER_BYTES, 1)
    meet(buffers.barrier, team)
    if moe.prepares_down:
        own = mlp_at(moe.own)
        for pair in range(thread, batch.tokens * moe.top_k, team):
            row = word(routed.row, pair)
            x = routed.inner + row * 2 * own.up + own.gate
            _prepare(moe, buffers, word(routed.chosen, pair), _DOWN, _SITES, x, row)
        meet(buffers.barrier, team)
    panels = width // PANEL
    item = fetch_add(routed.counters + 2 * COUNTER_BYTES, 1)
    while item < active * panels:
        _down(moe, buffers, routed, stride, word(routed.active, item // panels), item % panels)
        item = fetch_add(routed.counters + 2 * COUNTER_BYTES, 1)
    meet(buffers.barrier, team)
    for token in range(thread, batch.tokens, team):
        _add_up(moe, routed, token, width, y + token * stride, add)
    meet(buffers.barrier, team)
