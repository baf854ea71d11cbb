"""Predicted times of hand-offs: by the workers that are asked, the modules of the adapter, and the link."""

from dataclasses import replace

import pytest

from caraserve.core.machine_profile import Profile, load
from caraserve.gpu.assist.predictions import AssistPredictions, LayerWork, measured_predictions
from tests.gpu.small_model import SPEC
from tests.serving import PROFILE

WIDTHS = {"qkv": 1, "all": 4}  # hand-offs of a layer


@pytest.fixture(scope="module")
def profile() -> Profile:
    return replace(load(PROFILE), handoff_ms=0.05, link_bytes_per_s=1e9)


def test_work_is_that_of_the_largest_slice_of_the_workers_that_are_idle() -> None:
    made = AssistPredictions(tokens_per_worker=lambda rank: 32)
    assert made.work_of(128, 64, True, workers=7) == LayerWork(128, 32, 64, True)
    assert made.work_of(128, 64, True, workers=1).slice_tokens == 128, "one idle worker computes all"
    assert made.work_of(128, 64, True, workers=0).slice_tokens == 128
    assert made.work_of(20, 64, False, workers=7).slice_tokens == 20


def test_a_layer_takes_a_hand_off_for_each_module_group_its_largest_slice_and_all_deltas(profile: Profile) -> None:
    made = measured_predictions(profile, SPEC, delta_itemsize=2, slice_tokens=None)
    for targets, count in WIDTHS.items():
        work = LayerWork(tokens=100, slice_tokens=25, rank=64, has_all=targets == "all")
        groups = SPEC.layers[0].groups[:count]
        outputs = sum(width for group in groups for width in group.widths)
        expected_ms = count * 0.05 + profile.cpu_lora_ms(25, 64, targets) + 100 * 2 * outputs / 1e6  # type: ignore[arg-type]
        assert 1000 * made.hand_offs_s(work) == pytest.approx(expected_ms)


def test_slices_follow_the_profile_or_the_option(profile: Profile) -> None:
    assert measured_predictions(profile, SPEC, 2, None).tokens_per_worker(64) == profile.tokens_per_worker(64)
    assert measured_predictions(profile, SPEC, 2, 8).tokens_per_worker(64) == 8
