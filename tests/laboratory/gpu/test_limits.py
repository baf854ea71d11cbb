"""Stage `limits`: the speeds that others are compared with, and those that a stage measures itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu import limits
from scripts.laboratory.gpu.limits import link_bytes_per_s, memory_bytes_per_s
from scripts.laboratory.gpu.setup import CheckSetup, DeviceLimits
from tests.gpu.rehearsal import FACTS, SMALL, opener

KNOWN = DeviceLimits(4.4e12, 4.2e12, 3.6e12, {1 << 20: 50e9, 1 << 28: 55e9}, {1 << 28: 54e9}, 95e9, 8e14, 0.5, 12.0)


@pytest.fixture
def setup(tmp_path: Path) -> CheckSetup:
    return CheckSetup(opener(), FACTS, SMALL, tmp_path)


def test_the_floor_is_the_fastest_of_a_read_a_copy_and_a_product() -> None:
    assert KNOWN.memory_bytes_per_s == 4.4e12
    assert replace(KNOWN, product_bytes_per_s=4.5e12).memory_bytes_per_s == 4.5e12


def test_a_read_a_copy_and_a_product_are_each_measured(setup: CheckSetup) -> None:
    assert min(limits._memory(setup, setup.accelerator(Dtype.BF16))) > 0


def test_a_stage_alone_measures_memory_and_link(setup: CheckSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    acc = setup.accelerator(Dtype.BF16)
    monkeypatch.setattr(limits, "_memory", lambda setup, acc: (3.0, 5.0, 4.0))
    monkeypatch.setattr(limits, "_link", lambda setup, acc, base: ({1 << 16: 7.0, 1 << 28: 9.0}, {}))
    assert (memory_bytes_per_s(setup, acc), link_bytes_per_s(setup, acc)) == (5.0, 9.0)
    known = replace(setup, limits=KNOWN)
    assert (memory_bytes_per_s(known, acc), link_bytes_per_s(known, acc)) == (4.4e12, 55e9)


def test_little_memory_is_read_where_little_is_free(setup: CheckSetup) -> None:
    large = replace(setup, effort=replace(SMALL, memory_bytes=4 << 30))
    assert limits._memory_bytes(large) == FACTS.free_bytes // 4


def test_work_launched_from_python_is_run_once_more_than_it_is_timed(setup: CheckSetup) -> None:
    acc, ran = setup.accelerator(Dtype.BF16), list[int]()
    assert acc.median_ungraphed_us(lambda: acc.run(lambda: ran.append(1)), 3) > 0
    assert len(ran) == 4
