"""Measuring a backend: what it is asked for is allowed, what it answers is found again, nothing stays behind."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caraserve import demo
from caraserve.cli.main import main
from caraserve.core.backend import Limits
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, ScheduledRow, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.core.machine_profile import ASSUMED_HANDOFF_MS, SCHEMA, Profile, load, machine_key
from caraserve.cpu.lora_workers.timing import RoundTrip
from caraserve.errors import BackendFailed, ConfigError
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan, plan_of
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan
from caraserve.profiling import measure as calibrate
from caraserve.profiling.apply import loading_rules, make_profile, prepare_machine
from caraserve.profiling.cpu_lora_rate import LayerLora
from caraserve.profiling.measure import measure, model_key
from caraserve.profiling.microbench import adapter_spec, random_adapter
from tests.lora.folders import matrices
from tests.serving import engine_config, lora_config, model_config

MIB = 1 << 20
PREFILL = 3.0, 0.25, 0.002  # ms, a token, a token and rank
DECODE = 5.0, 0.3, 0.01  # ms, a request, a rank


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of the LoRA kernels, which these backends do not replace, need not be exact here."""
    monkeypatch.setattr(calibrate, "_LORA_LEAST_MS", 0.0)


def spec() -> DecoderPlan:
    return load_plan(demo.model_folder())


class ExactBackend:
    """Takes exactly the times above, whatever the clock says, and notes everything that a backend may refuse."""

    def __init__(self, limits: Limits, host_bytes: int = 64 * MIB) -> None:
        self.limits = limits
        self.host_memory = aligned_bytes(host_bytes)
        self.faults: list[str] = []
        self.ranks: dict[int, int] = {BASE_ADAPTER_SLOT: 0}
        self.most_ranks = self.ranks
        self._tokens: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}
        self.failing = False

    def launch(self, plan: Batch, done: Callable[[StepResult | Exception], None]) -> None:
        if self.failing:
            done(RuntimeError("the device is gone"))
            return
        self._tokens |= {start.slot: len(start.token_ids) for start in plan.starts}
        self._blocks |= {grant.slot: grant.blocks for grant in plan.grants if grant.first == 0}
        self._check(plan)
        done(StepResult((), 0.0, self._ms(plan.rows) / 1000))

    def _ms(self, rows: Sequence[ScheduledRow]) -> float:
        ranks = [self.ranks[row.adapter_slot] for row in rows]
        if all(row.count == 1 for row in rows):
            return DECODE[0] + DECODE[1] * len(rows) + DECODE[2] * sum(ranks)
        return PREFILL[0] + sum(
            row.count * (PREFILL[1] + PREFILL[2] * rank) for row, rank in zip(rows, ranks, strict=True)
        )

    def _check(self, plan: Batch) -> None:
        slots = [row.slot for row in plan.rows]
        adapters = [row.adapter_slot for row in plan.rows]
        ends = {row.slot: row.start + row.count for row in plan.rows}
        per_block, limits = self.limits.block_tokens, self.limits
        rules = {
            "a slot twice": len(set(slots)) == len(slots),
            "no such slot": max(slots) < limits.num_slots,
            "rows out of order": adapters == sorted(adapters),
            "an adapter that is not there": set(adapters) <= set(self.ranks),
            "too many tokens": 0 < plan.num_tokens <= limits.max_step_tokens,
            "past the context": max(ends.values()) < limits.max_context,
            "tokens that were not set": all(self._tokens[slot] >= end for slot, end in ends.items()),
            "no block": all(len(self._blocks[slot]) * per_block >= end for slot, end in ends.items()),
            "no such block": all(0 <= block < limits.num_blocks for slot in slots for block in self._blocks[slot]),
        }
        self.faults += [rule for rule, kept in rules.items() if not kept]

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
        first_layer: int = 0,
    ) -> None:
        first = int(adapter.data.ctypes.data) - int(self.host_memory.ctypes.data)
        if not (first >= 0 and first + adapter.data.nbytes <= self.host_memory.nbytes and first % 64 == 0):
            self.faults.append("bytes outside the host's memory")
        if (
            slot in self.ranks
            or not 0 < slot < self.limits.adapter_slots
            or adapter.data.nbytes != adapter.spec.num_bytes
        ):
            self.faults.append("a load to a slot that is taken or none, or of too few bytes")
        self.ranks = self.ranks | {slot: adapter.spec.rank}
        self.most_ranks = max(self.most_ranks, self.ranks, key=len)
        done(None)

    def device_bytes(self, spec: AdapterSpec) -> int:
        return spec.num_bytes

    def _unexpected(self, *_: object) -> None:
        self.faults.append("a load of which not all was there, a side batch, or vectors")

    extend_load = break_load = recall = release_vectors = _unexpected

    def unload_adapter(self, slot: int) -> None:
        self.ranks = {bound: rank for bound, rank in self.ranks.items() if bound != slot}

    def close(self) -> None:
        pass


TINY = Limits(
    num_blocks=4, block_tokens=16, num_slots=8, adapter_slots=5, max_step_tokens=40, max_context=24, embedding_size=1
)
SMALL = replace(TINY, num_blocks=9, num_slots=3, max_context=48)
LARGE = replace(TINY, num_blocks=500, num_slots=64, adapter_slots=1025, max_step_tokens=256, max_context=1024)


def quick(backend: ExactBackend, progress: Callable[[float], None] = lambda share: None) -> Profile:
    return measure(backend, spec(), quick=True, progress=progress)


@pytest.mark.parametrize("limits", [LARGE, SMALL, TINY], ids=["large", "small", "tiny"])
def test_a_profile_predicts_the_times_of_its_backend(limits: Limits) -> None:
    backend = ExactBackend(limits)
    made = quick(backend)
    fit, decode = made.prefill, made.decode
    assert (fit.base_ms, fit.per_token_ms, fit.per_token_rank_ms) == pytest.approx(PREFILL)
    assert (decode.beta_ms, decode.gamma_ms, decode.alpha_ms) == pytest.approx(DECODE)
    assert fit.r2 == decode.r2 == pytest.approx(1.0)
    assert backend.faults == []
    assert backend.ranks == {BASE_ADAPTER_SLOT: 0}, "it is left without adapters"
    assert set(backend.most_ranks.values()) == {0, 8, 32}


def test_a_profile_names_its_machine_and_model() -> None:
    made = measure(
        ExactBackend(LARGE), spec(), quick=True, progress=lambda share: None, measure_handoff=lambda: 0.02, threads=3
    )
    assert made.handoff_ms == 0.02
    assert made.quick
    assert made.machine == machine_key()
    assert made.model == model_key(spec(), "bfloat16", 3)
    assert quick(ExactBackend(LARGE)).handoff_ms is None
    assert {(rate.rank, rate.targets) for rate in made.lora} == {
        (rank, targets) for rank in (8, 16, 32, 64, 128) for targets in ("qkv", "all")
    }


class _Workers:
    def __len__(self) -> int:
        return 2

    def await_all(self, timeout_s: float) -> bool:
        return True


class _Untimed(ExactBackend):
    """Has CPU workers that are never free, so that no hand-off can be timed."""

    accelerator, shares_cores, workers, pads_to_largest_rank = "", False, _Workers(), False
    delta_itemsize = 2

    def time_hand_off(self, slot: int, tokens: int) -> None:
        return None


class _Padding(ExactBackend):
    """Takes in a decode iteration as long as if all adapters had the largest rank among them."""

    def _ms(self, rows: Sequence[ScheduledRow]) -> float:
        largest = max(self.ranks[row.adapter_slot] for row in rows)
        if any(row.count > 1 for row in rows):
            return super()._ms(rows)
        return DECODE[0] + len(rows) * (DECODE[1] + DECODE[2] * largest)


def test_the_profile_of_a_kernel_that_pads_predicts_by_the_largest_rank() -> None:
    made = measure(_Padding(LARGE), spec(), quick=True, progress=lambda share: None, padded=True)
    assert (made.decode.beta_ms, made.decode.gamma_ms, made.decode.alpha_ms) == pytest.approx(DECODE)
    assert made.decode.is_padded
    assert made.decode.r2 == pytest.approx(1.0)
    assert made.model.endswith("-padded")


def test_a_profile_of_another_lora_kernel_is_refused(tmp_path: Path) -> None:
    measure(_Padding(LARGE), spec(), quick=True, progress=lambda share: None, padded=True).save(tmp_path / "p.json")
    backend: Any = _Untimed(LARGE)
    backend.start_workers = lambda tokens_per_worker: None
    lora = lora_config({}, mode="auto", profile=tmp_path / "p.json")
    with pytest.raises(ConfigError, match="measured with another --lora-kernel than bgmv;"):
        prepare_machine(backend, spec(), model_config(tmp_path), engine_config(), lora, lambda: None)


def test_routing_has_the_machine_profiled_in_every_loading_mode(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    measure(_Untimed(LARGE), spec(), quick=True, progress=lambda share: None).save(path)

    def found(mode: str, profile: Path | None, *, for_routing: bool) -> bool:
        backend: Any = _Untimed(LARGE)
        backend.start_workers = backend.use = lambda *values, **named: None
        lora = lora_config({}, mode=mode, profile=profile)
        made = prepare_machine(
            backend, spec(), model_config(tmp_path), engine_config(), lora, lambda: None, for_routing=for_routing
        )
        assert loading_rules(backend, spec(), made, lora).mode.name == mode
        return made is not None

    for mode in ("cached", "ondemand", "merged"):
        assert not found(mode, None, for_routing=False), mode
        assert not found(mode, path, for_routing=False), mode
        assert found(mode, path, for_routing=True), mode
    assert found("auto", path, for_routing=False)


@pytest.mark.parametrize(("beyond_ms", "kept_ms"), [(0.00095, None), (-0.01, None), (0.02, 0.02)])
def test_a_hand_off_that_seems_faster_than_any_is_not_kept(
    beyond_ms: float, kept_ms: float | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = _Untimed(LARGE)
    timed = RoundTrip(total_s=0.3e-3 + beyond_ms / 1000, compute_s=0.3e-3)
    monkeypatch.setattr(_Untimed, "time_hand_off", lambda backend, slot, tokens: timed)
    made = make_profile(backend, spec(), "bfloat16", None, quick=True, progress=lambda share: None)
    assert made.handoff_ms == (None if kept_ms is None else pytest.approx(kept_ms))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # there is nothing to do about it


def test_without_a_measured_hand_off_auto_logs_its_assumption(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend: Any = _Untimed(LARGE)
    made = make_profile(backend, spec(), "bfloat16", None, quick=True, progress=lambda share: None)
    assert made.handoff_ms is None
    with caplog.at_level("INFO"):
        rules = [
            loading_rules(backend, spec(), profile, lora_config({}, mode="auto"))
            for profile in (made, replace(made, handoff_ms=0.01))
        ]
    assert [rule.handoff_ms for rule in rules] == [ASSUMED_HANDOFF_MS, 0.01]
    widths = [linear.outputs for linear in spec().layers[0].linears]
    assert rules[0].delta_bytes == {"qkv": 2 * sum(widths[:3]), "all": 2 * sum(widths)}
    assert rules[0].attention_targets == {"q_proj", "k_proj", "v_proj"}
    assert rules[0].hand_offs == 4
    assert len([record for record in caplog.records if "auto assumes 0.05 ms" in record.message]) == 1


def test_a_saved_profile_without_a_hand_off_gets_it_when_there_are_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a start in a mode without workers, or one whose workers were not there in time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lora = lora_config({}, mode="auto", profile=None)

    def start(handoff_s: float | None) -> tuple[float | None, ExactBackend]:
        """Returns the hand-off's time in the profile of a start at which a hand-off takes so long, None: workers are
        not there in time."""
        backend: Any = _Untimed(LARGE)
        backend.start_workers = backend.use = lambda *values, **named: None
        timed = None if handoff_s is None else RoundTrip(total_s=1e-3 + handoff_s, compute_s=1e-3)
        backend.time_hand_off = lambda slot, tokens: timed if backend.ranks.get(slot) else None
        made = prepare_machine(backend, spec(), model_config(tmp_path), engine_config(), lora, lambda: None)
        assert made is not None
        (saved,) = tmp_path.rglob("*.json")
        assert load(saved) == made
        assert backend.faults == []
        assert backend.ranks == {BASE_ADAPTER_SLOT: 0}
        return made.handoff_ms, backend

    assert start(None)[0] is None
    handoff_ms, backend = start(0.02e-3)
    assert handoff_ms == pytest.approx(0.02)
    assert backend.most_ranks == {BASE_ADAPTER_SLOT: 0, 1: 8}  # nothing else was measured again
    assert start(0.9e-3)[0] == handoff_ms


def test_a_saved_profile_of_another_version_is_replaced_and_that_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lora = lora_config({}, mode="auto", profile=None)

    def start() -> Profile | None:
        backend: Any = _Untimed(LARGE)
        backend.start_workers = backend.use = lambda *values, **named: None
        return prepare_machine(backend, spec(), model_config(tmp_path), engine_config(), lora, lambda: None)

    start()
    (saved,) = tmp_path.rglob("*.json")
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"schema": SCHEMA - 1}))
    with caplog.at_level("INFO", "caraserve.profiling.apply"):
        assert start() == load(saved)
    assert [record.levelname for record in caplog.records if "of another version" in record.message] == ["INFO"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_models_with_different_times_have_different_keys() -> None:
    keys = [model_key(spec(), "bfloat16", threads) for threads in (None, 1, 11)]
    keys += [model_key(spec(), "float32"), model_key(odd_spec(), "bfloat16")]
    keys.append(model_key(spec(), "bfloat16", padded=True))
    assert len(set(keys)) == len(keys)


def test_a_backend_that_fails_is_reported_and_left_without_adapters() -> None:
    backend = ExactBackend(LARGE)
    backend.failing = True
    with pytest.raises(BackendFailed, match="the device is gone"):
        quick(backend)
    assert backend.ranks == {BASE_ADAPTER_SLOT: 0}
    assert len(backend.most_ranks) > 1


def test_ranks_without_room_in_host_memory_are_left_out() -> None:
    smallest = adapter_spec(spec(), Dtype.BF16, 8, len(spec().layers)).num_bytes
    backend = ExactBackend(LARGE, host_bytes=smallest)
    assert {point.rank for point in quick(backend).prefill.points} == {0, 8}
    assert backend.faults == []
    with pytest.raises(ConfigError, match="rank 8 takes"):
        quick(ExactBackend(LARGE, host_bytes=smallest - 64))


def shares_told(monkeypatch: pytest.MonkeyPatch, tick_s: float) -> list[float]:
    """What `progress` hears when every look at the clock takes so long."""
    clock = itertools.count()
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: tick_s * next(clock), time=time.time))
    shares: list[float] = []
    quick(ExactBackend(LARGE), shares.append)
    return shares


def test_progress_only_rises_and_slow_machines_get_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, crawling = (shares_told(monkeypatch, tick_s) for tick_s in (0.0, 0.003, 0.2))
    for shares in (fast, slow, crawling):
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] == 1.0
    assert len(fast) // 7 == len(slow) // 3 >= len(crawling) - 1  # points in a round


class SlowBackend(ExactBackend):
    """Takes so many times as long, by a clock of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__(LARGE)
        self._factor = factor
        self.clock_s = 0.0

    def _ms(self, rows: Sequence[ScheduledRow]) -> float:
        ms = self._factor * super()._ms(rows)
        self.clock_s += ms / 1000
        return ms


def test_a_model_of_30_ms_for_a_token_is_measured_in_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SlowBackend(8.0)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: backend.clock_s, time=time.time))
    made = quick(backend)
    assert backend.clock_s < 2.2  # more comes with memory, adapters and compiled kernels: 5 s in all
    assert len(made.prefill.points) > 3 < len(made.decode.points)


def test_a_large_model_is_measured_within_seconds_at_fewer_points(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SlowBackend(30.0)  # 0.1 s for a token alone, and a second for 128 of them
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: backend.clock_s, time=time.time))
    made, full = quick(backend), quick(ExactBackend(LARGE))
    assert backend.clock_s < 4.0
    assert 3 <= len(made.prefill.points) < len(full.prefill.points)
    assert 3 <= len(made.decode.points) < len(full.decode.points)
    fit, decode = made.prefill, made.decode
    assert (fit.base_ms, fit.per_token_ms, fit.per_token_rank_ms) == pytest.approx([30 * ms for ms in PREFILL])
    assert (decode.beta_ms, decode.gamma_ms, decode.alpha_ms) == pytest.approx([30 * ms for ms in DECODE])


def test_a_model_too_slow_to_be_measured_at_a_start_is_not() -> None:
    backend = SlowBackend(100.0)
    with pytest.raises(ConfigError, match="one token takes 530 ms"):
        quick(backend)
    assert backend.clock_s < 2.0


# --- what is measured ---


def odd_spec() -> DecoderPlan:
    """Widths that are no multiple of a panel, nor all of a vector."""
    return plan_of(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 300,
            "hidden_size": 80,
            "intermediate_size": 150,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
        }
    )


def first_layer(plan: DecoderPlan, adapter: HostAdapter) -> Iterator[tuple[LinearPlan, np.ndarray, np.ndarray]]:
    """Yields each module of the first layer with A [rank, padded inputs] and B [rank, padded outputs]."""
    for span in adapter.spec.spans:
        if span.layer == 0:
            yield plan.layers[0].linears[span.linear], *matrices(adapter, span, plan)


def test_random_adapters_have_small_weights_everywhere_and_zeros_as_padding() -> None:
    model = odd_spec()
    layout = adapter_spec(model, Dtype.F32, 16, len(model.layers))
    memory = aligned_bytes(layout.num_bytes + 64)
    memory[:] = 255
    for linear, a, b in first_layer(model, random_adapter(model, layout, memory)):
        for matrix, width in ((a, linear.inputs), (b, linear.outputs)):
            assert (matrix[:, :width] != 0).all()
            assert (matrix[:, width:] == 0).all()
    assert (memory[layout.num_bytes :] == 255).all()
    for dtype in (Dtype.F16, Dtype.BF16):
        layout = adapter_spec(model, dtype, 8, len(model.layers))
        words = random_adapter(model, layout, aligned_bytes(layout.num_bytes)).data.view(np.uint16)
        values = words.view(np.float16) if dtype is Dtype.F16 else (words.astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(values).all()
        assert 0.01 < values[values != 0].astype(np.float32).std() < 0.03


def test_the_rate_on_one_core_counts_the_whole_product() -> None:
    model = odd_spec()
    layout = adapter_spec(model, Dtype.F32, 16, 1)
    adapter = random_adapter(model, layout, aligned_bytes(layout.num_bytes))
    for linear, a, b in first_layer(model, adapter):
        lora = LayerLora(model, adapter, (linear.target,), tokens=40)
        lora.x[:] = np.random.default_rng(0).standard_normal(lora.x.shape)
        assert lora.layer_ms(2) > 0
        expected = lora.x[:, : a.shape[1]].astype(np.float64) @ a.T @ b
        np.testing.assert_allclose(lora.y[:, : b.shape[1]], expected, rtol=1e-4, atol=1e-5)


# --- the command ---


def test_the_command_writes_and_prints_a_profile_of_the_demo(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    command = [sys.executable, "-m", "caraserve", "profile", "--quick", "--output", str(path), "--cpu-threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "R²" in result.stdout
    assert str(path) in result.stdout
    assert "measured in" in result.stderr
    made = load(path)
    assert made.model == model_key(spec(), "bfloat16", 1)
    assert made.quick
    assert min(point.ms for point in (*made.prefill.points, *made.decode.points)) > 0
    assert made.prefill_ms(128, 32) > made.prefill_ms(16, 0) > 0
    assert made.decode_ms([8] * 8) > 0
    assert made.load_ms(MIB) > 0


def test_a_missing_model_is_refused_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "/nonexistent", "--quick"]) == 1
    assert "does not exist" in capsys.readouterr().err
