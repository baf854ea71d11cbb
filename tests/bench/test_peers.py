"""The comparison with other servers, without servers: figures of records, ratios and targets, and GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caraserve.bench.records import RequestRecord
from caraserve.bench.synthetic import Shape, write_adapters
from caraserve.bench.synthetic import write_model as write_folder
from caraserve.errors import ConfigError
from caraserve.model.gguf_reader import GgufFile
from caraserve.model.safetensors_reader import TensorFile
from scripts.bench.peers.__main__ import _continued
from scripts.bench.peers.gguf_writer import write_adapter, write_model
from scripts.bench.peers.rounds import figures_of
from scripts.bench.peers.summary import comparisons, table

TINY = Shape(hidden=64, layers=1, intermediate=64, vocab=512, heads=4, kv_heads=2)


def record(sent_s: float, *token_s: float) -> RequestRecord:
    return RequestRecord(0, "base", 0, 0.0, sent_s, token_s[-1], 128, len(token_s), token_s=token_s)


def test_figures_are_times_of_requests_and_tokens_of_all_per_second() -> None:
    figures = figures_of([record(1.0, 1.5, 1.75, 2.0), record(1.0, 2.0, 2.5, 3.0)])
    assert figures["ttft_ms"] == pytest.approx([500, 1000])
    assert figures["tpot_ms"] == pytest.approx([250, 500])
    assert figures["tokens_per_s"] == pytest.approx([6 / 2])


def measured(**servers: list[float]) -> dict[str, Any]:
    """Rounds in which each server's time per token is the next of its list."""
    rounds = [
        {"samples": {name: {"tpot_ms": [value]} for name, value in zip(servers, values, strict=True)}}
        for values in zip(*servers.values(), strict=True)
    ]
    return {"servers": {}, "unavailable": {}, "rounds": [one | {"cores_of_others": 0.0} for one in rounds]}


def test_a_ratio_is_the_median_of_ratios_within_rounds() -> None:
    # the machine is half as fast in the second round
    document = {"formats": {"fp32": measured(**{"CaraServe": [8, 18, 9], "llama.cpp": [10, 20, 10]})}}
    (found,) = comparisons(document)
    assert (found.ours, found.peers) == (9, {"llama.cpp": 10})
    assert found.ratios["llama.cpp"] == pytest.approx((0.9, 0.8, 0.9))
    assert found.targets == {"llama.cpp": 0.95}
    assert found.is_met("llama.cpp")


def test_a_server_with_further_arguments_has_targets_of_its_own() -> None:
    servers = {"CaraServe": [10.0], "CaraServe --fast": [6.0], "llama.cpp": [10.0]}
    exact, other = comparisons({"formats": {"q4_0": measured(**servers)}})
    assert (exact.targets, exact.is_met("llama.cpp")) == ({"llama.cpp": 0.95}, False)
    assert (other.targets, other.is_met("llama.cpp")) == ({"llama.cpp": 0.7}, True)


def test_the_best_peer_has_the_most_tokens_or_the_shortest_time() -> None:
    def one(metric: str) -> dict[str, str]:
        samples = {name: {metric: [value]} for name, value in (("CaraServe", 5.0), ("llama.cpp", 4.0), ("vLLM", 3.0))}
        part = {"servers": {}, "unavailable": {}, "rounds": [{"samples": samples, "cores_of_others": 0.0}]}
        (found,) = comparisons({"formats": {"fp32": part}})
        return {peer: "met" if found.is_met(peer) else "missed" for peer in found.targets}

    assert one("tokens_per_s") == {"llama.cpp": "missed"}  # 1.25 of at least 1.6
    assert one("ttft_ms") == {"vLLM": "missed"}  # 1.67 of at most 0.78


def test_the_table_names_servers_that_were_not_measured() -> None:
    part = measured(**{"CaraServe": [8.0], "llama.cpp": [10.0]}) | {"unavailable": {"vLLM": "no such instruction"}}
    shown = table({"formats": {"bf16": part}})
    assert "bf16: vLLM is not measured: no such instruction" in shown.note
    assert shown.rows[0][4:7] == ["10", "0.80 (0.80–0.80)", "≤ 0.9 met"]


def test_a_document_is_continued_by_the_same_settings_only(tmp_path: Path) -> None:
    fresh = {"arguments": {"threads": 2}, "versions": {}, "peers": {}, "formats": {}}
    path = tmp_path / "peers.json"
    assert _continued(path, fresh) is fresh
    path.write_text(json.dumps(fresh | {"formats": {"fp32": {"rounds": [1]}}}))
    assert _continued(path, fresh)["formats"] == {"fp32": {"rounds": [1]}}
    with pytest.raises(ConfigError, match="figures of other arguments: delete it"):
        _continued(path, fresh | {"arguments": {"threads": 1}})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_and_an_adapter_as_gguf_have_the_numbers_of_the_folders(tmp_path: Path, dtype: str) -> None:
    plan = write_folder(tmp_path / "model", TINY, dtype, 64)
    adapters = write_adapters(tmp_path, plan, count=1, ranks=[4], targets=["k_proj", "up_proj"], dtype=dtype)
    write_model(tmp_path / "model", tmp_path / "model.gguf")
    write_adapter(adapters["adapter-00"], tmp_path / "model", tmp_path / "adapter.gguf")

    def rows_of_halves(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """GGUF has outputs 0 and half a head further beside each other."""
        head = TINY.hidden // TINY.heads
        order = [
            start + place for start in range(0, len(rows), head) for place in (*range(0, head, 2), *range(1, head, 2))
        ]
        return rows[np.array(order)]

    with GgufFile(tmp_path / "model.gguf") as gguf, TensorFile(tmp_path / "model" / "model.safetensors") as folder:
        prefix = "model.layers.0."
        assert np.array_equal(gguf.raw("output.weight"), folder.raw("lm_head.weight"))
        assert np.array_equal(gguf.raw("blk.0.ffn_down.weight"), folder.raw(f"{prefix}mlp.down_proj.weight"))
        assert np.array_equal(
            rows_of_halves(gguf.raw("blk.0.attn_q.weight")), folder.raw(f"{prefix}self_attn.q_proj.weight")
        )
        assert np.array_equal(gguf.raw("blk.0.attn_norm.weight"), np.ones(TINY.hidden, np.float32))
        assert len(gguf.metadata["tokenizer.ggml.tokens"]) == TINY.vocab
        assert gguf.metadata["llama.attention.head_count_kv"] == TINY.kv_heads
    stored = adapters["adapter-00"] / "adapter_model.safetensors"
    with GgufFile(tmp_path / "adapter.gguf") as gguf, TensorFile(stored) as folder:
        prefix = "base_model.model.model.layers.0."
        assert gguf.metadata["adapter.lora.alpha"] == 8.0
        assert np.array_equal(gguf.raw("blk.0.ffn_up.weight.lora_a"), folder.raw(f"{prefix}mlp.up_proj.lora_A.weight"))
        assert np.array_equal(
            rows_of_halves(gguf.raw("blk.0.attn_k.weight.lora_b")),
            folder.raw(f"{prefix}self_attn.k_proj.lora_B.weight"),
        )
