"""Compares batches that FlashInfer plans with our kernels; run by test_triton_cases.py in Triton's interpreter.

FlashInfer itself is a stand-in here, so these cases show what is planned and in which order it is written; on a GPU,
`scripts/gpu_check` compares the package.
"""

from dataclasses import replace

import pytest
import torch

from caraserve.core.batch import ScheduledRow
from caraserve.gpu.kernels.attention import NO_WINDOW
from tests.gpu.fake_flashinfer import install, prefill_on
from tests.gpu.host_device import HostDriver
from tests.gpu.kernels.triton_attention_cases import decode, make_cache, prefill, queries, tables
from tests.gpu.small_model import SPEC

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in computes on the host")

# (first position, tokens) of each slot, in the order of the batch: decoding rows before, between and after chunks; one
# chunk begins with its prompt, the others have a context.
MIXED = [(130, 1), (0, 90), (17, 1), (64, 1), (33, 79), (128, 100), (5, 1)]
CHUNKS = [(0, 65), (150, 70)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "parts"),
    [
        (4, 1, 16, NO_WINDOW, MIXED),
        (2, 2, 32, 50, MIXED),
        (6, 2, 16, 1, MIXED),
        (4, 4, 16, NO_WINDOW, CHUNKS),
    ],
)
def test_a_planned_batch_is_attended_as_by_our_kernels(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dim: int, window: int, parts: list[tuple[int, int]]
) -> None:
    install(monkeypatch)
    window_of_spec = None if window == NO_WINDOW else window
    spec = replace(SPEC, heads=heads, kv_heads=kv_heads, head_dim=dim, windows=(window_of_spec,))
    cache = make_cache(len(parts), 240, kv_heads, dim, torch.float32)
    slots = list(range(len(parts)))[::-1]
    rows = [
        ScheduledRow(slot, start, count, 0, samples=False) for slot, (start, count) in zip(slots, parts, strict=True)
    ]
    q = queries(sum(row.count for row in rows), heads, dim, torch.float32)
    of_tokens = [(row.slot, row.start + index) for row in rows for index in range(row.count)]
    tokens = tables(*map(list, zip(*of_tokens, strict=True)))
    firsts = [sum(row.count for row in rows[:index]) for index in range(len(rows))]
    decoding = [first for first, row in zip(firsts, rows, strict=True) if row.count == 1]
    chunks = [(first, row.count) for first, row in zip(firsts, rows, strict=True) if row.count > 1]
    ours = prefill(q, cache, tokens, chunks, window)
    if decoding:
        ours[decoding] = decode(q, cache, tokens, decoding, window, 240)[decoding]

    driver = HostDriver()
    planner = prefill_on(driver, spec, cache.block_table.numpy())
    planned = planner.plan(rows, cache.block_table.numpy())
    assert planned is not None
    out = torch.full_like(q, torch.nan)
    driver.call(planner._stream, lambda: planned.attend(q, cache, out, window))
    event = driver.create_event()
    driver.record(event, planner._stream)
    driver.synchronize(event)
    if decoding:
        out[decoding] = decode(q, cache, tokens, decoding, window, 240)[decoding]
    torch.testing.assert_close(out, ours, atol=2e-6, rtol=2e-6)
