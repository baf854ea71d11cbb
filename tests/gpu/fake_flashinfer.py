"""Stands in for the package flashinfer, over the device of host_device.py.

Signatures are those of class BatchPrefillWithPagedKVCacheWrapper in flashinfer/prefill.py of flashinfer-python
0.7.2.post1, as its wheel has them. As there, `plan` writes the batch to the wrapper's one pinned buffer, issues copies
of it and of the lists on the current stream, and returns; a copy reads its source when the stream comes to it. `run`
issues a kernel, which reads device memory alone.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.gpu.forward.flashinfer_prefill import FlashInferPrefill
from caraserve.model.spec import ModelSpec
from tests.gpu.host_device import HostDriver, calling

Ints = NDArray[np.int32]
_BUFFER_INTS = 1 << 14


@dataclass
class Used:
    """What was asked of the package."""

    compiled: set[tuple[object, ...]] = field(default_factory=set)  # its modules, each by what it is compiled for
    windows: list[int] = field(default_factory=list)  # `window_left` of each plan
    runs: int = 0


def install(monkeypatch: pytest.MonkeyPatch) -> Used:
    """Makes `import flashinfer` return the stand-in."""
    module, used = ModuleType("flashinfer"), Used()
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = partial(_Wrapper, used)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return used


def prefill_on(driver: HostDriver, spec: ModelSpec, table: Ints, turns: int = 3) -> FlashInferPrefill:
    """Returns an object that plans on a stream of its own. `table`: int32 [slots, most blocks of a request]."""
    stream, kept = driver.create_stream(0), list[Ints]()

    def send(address: int, blocks: Ints) -> None:
        kept.append(blocks)
        driver.copy_to_device(address, blocks.ctypes.data, blocks.nbytes, stream)

    slots, most = table.shape
    return FlashInferPrefill(spec, torch.float32, (slots, most), turns, driver, stream, torch.device("cpu"), send)


class _Wrapper:
    """Plans and attends for one batch at a time."""

    def __init__(
        self,
        used: Used,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert (kv_layout, use_cuda_graph, backend, jit_args, variant_owns_mask) == ("NHD", False, "auto", None, False)
        assert float_workspace_buffer.data_ptr() % 16 == 0
        self._used = used
        self._int_workspace_buffer, self._pin_memory_int_workspace_buffer = (
            torch.zeros(_BUFFER_INTS, dtype=torch.int32) for _ in range(2)
        )

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        assert causal, "prompts see their past alone"
        assert disable_split_kv, "splits depend on the batch"
        assert seq_lens is not None, "contexts would be copied from memory that is not pinned, which waits"
        lists = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (*lists, paged_kv_indices))
        requests, pages = len(qo_indptr) - 1, paged_kv_indptr.diff()
        assert [len(each) for each in lists] == [requests + 1, requests + 1, requests, requests]
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert torch.equal((pages - 1) * page_size + paged_kv_last_page_len, seq_lens)
        assert bool((seq_lens >= qo_indptr.diff()).all()), "a query would see no key"
        self._used.compiled.add((q_data_type, kv_data_type or q_data_type, head_dim_qk, window_left >= 0))
        self._used.windows.append(window_left)
        planned = torch.cat([qo_indptr, paged_kv_indptr, seq_lens])
        self._pin_memory_int_workspace_buffer[: len(planned)] = planned
        _copy(self._int_workspace_buffer[: len(planned)], self._pin_memory_int_workspace_buffer)
        self._copies = [torch.empty_like(each) for each in lists]
        for target, source in zip(self._copies, lists, strict=True):
            _copy(target, source)
        self._tokens, self._dtype = int(qo_indptr[-1]), q_data_type
        self._plan_info = partial(
            _attend, self._int_workspace_buffer, self._copies, requests, paged_kv_indices, window_left
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        assert isinstance(paged_kv_cache, tuple)
        keys, values = paged_kv_cache
        assert out is not None, "results would take new device memory"
        assert q.shape == out.shape == (self._tokens, *q.shape[1:])
        assert q.dtype == keys.dtype == self._dtype
        assert q.stride()[1:] == (q.shape[2], 1)
        assert out.is_contiguous()
        assert keys.stride() == values.stride(), "another module would be compiled"
        self._used.runs += 1
        attend = partial(self._plan_info, q, keys, values, out)
        calling.driver.run(calling.stream, attend)
        return out


def _copy(target: Tensor, source: Tensor) -> None:
    calling.driver.copy_to_device(target.data_ptr(), source.data_ptr(), target.nbytes, calling.stream)


def _attend(
    plan: Tensor,
    copies: list[Tensor],
    requests: int,
    pages: Tensor,
    window_left: int,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
) -> None:
    """The kernel: reads the plan and the copied lists as they are on the device now."""
    query_ends, page_ends, contexts = plan[: 3 * requests + 2].split([requests + 1, requests + 1, requests])
    of_plan, of_lists = (query_ends, page_ends, contexts), (*copies[:2], copies[3])
    assert all(torch.equal(*pair) for pair in zip(of_plan, of_lists, strict=True)), "a plan was overwritten"
    for first, end, page, last, context in zip(
        query_ends[:-1], query_ends[1:], page_ends[:-1], page_ends[1:], contexts.tolist(), strict=True
    ):
        block = pages[page:last].long()
        # [context, kv heads, dim]
        key, value = (part[block].flatten(0, 1)[:context].float() for part in (keys, values))
        queries = q[first:end].float().unflatten(1, (key.shape[1], -1))
        scores = torch.einsum("thgd,shd->hgts", queries, key) * q.shape[2] ** -0.5
        at, seen = torch.arange(context - int(end - first), context)[:, None], torch.arange(context)[None, :]
        hidden = (seen > at) | ((seen < at - window_left) if window_left >= 0 else False)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hgts,shd->thgd", weights, value).flatten(1, 2)
