"""Real fleets on one machine: instances keep to their share of a core, and simulations are of the same requests."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import ClusterSetting
from caraserve.bench.simulator.simulation import Simulation
from caraserve.core.machine_profile import SCHEMA, Decode, DecodePoint, LoraRate, Prefill, PrefillPoint, Profile
from caraserve.errors import ConfigError
from scripts.laboratory.fleet import cpu_share
from scripts.laboratory.fleet.compare import compare, machines, slo_ms
from scripts.laboratory.fleet.cpu_share import cpu_shares
from scripts.laboratory.fleet.measure import FIXED, RANKS, Calibration, FleetRun, Probe, ServedRequest

COMPUTE_S = 0.6
COMPUTE = f"""
import time
end, began = time.monotonic() + {COMPUTE_S}, time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - began)
"""
needs_groups = pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/cpu/cpu.shares", os.W_OK), reason="needs root and control groups of version 1"
)


def profile(scale: float = 1.0) -> Profile:
    """Returns an instance that decodes in 10 ms, and 1 ms for each request, and prefills in 1 ms a token."""
    decode = [DecodePoint(n, n * rank, rank, scale * (10 + n)) for n in (1, 8, 16) for rank in (8, 64)]
    prefill = [PrefillPoint(tokens, rank, scale * (10 + tokens)) for tokens in (16, 128) for rank in (0, 64)]
    rates = (LoraRate(8, "qkv", 1e6, 0.1), LoraRate(8, "all", 1e6, 0.1))
    times = (1e9, 0.0, None)
    return Profile(SCHEMA, "m", "m", 0.0, True, *times, rates, Prefill.fitted(prefill), Decode.fitted(decode))


def alone(routing: str = FIXED, probes: tuple[Probe, ...] = ()) -> FleetRun:
    """Returns a run of two instances in which requests of 10 prompt tokens and 5 output tokens never meet."""
    requests = tuple(ServedRequest(n % 2, n % len(RANKS), 10, 5, float(n), n + 0.020, n + 0.064) for n in range(20))
    return FleetRun(2, routing, 0.1, 1.0, requests, 0.0, 0.1, {}, probes)


@needs_groups
def test_a_process_gets_no_more_than_its_share_of_a_core() -> None:
    with cpu_shares(1, 0.2) as (share,):
        share.limit()
        command = [sys.executable, "-c", COMPUTE]
        found = subprocess.run(command, preexec_fn=share.join, capture_output=True, text=True, check=True)
        assert float(found.stdout) < 0.4 * COMPUTE_S, "a fifth, in pieces of 4 ms"
    assert not share.folder.exists(), "the group is removed"


@needs_groups
def test_groups_are_removed_when_a_measurement_fails() -> None:
    with pytest.raises(RuntimeError, match="no more"), cpu_shares(2, 0.1) as shares:
        raise RuntimeError("no more")
    assert not any(share.folder.exists() for share in shares)


def test_more_shares_than_fit_on_the_cores_and_a_machine_without_groups_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="do not fit"), cpu_shares(5 * len(os.sched_getaffinity(0)) + 1, 0.2):
        pass
    monkeypatch.setattr(cpu_share, "_CPU", tmp_path / "none")
    with pytest.raises(ConfigError, match="none has no CPU controller"), cpu_shares(1, 0.2):
        pass


@pytest.mark.parametrize("routing", [FIXED, "random"])
def test_requests_that_never_meet_take_as_long_as_the_profile_says(routing: str) -> None:
    found = compare(alone(routing), Calibration((profile(), profile()), 10.0, ()))
    # A prefill of 20 ms, four decode iterations of 11 ms, and a hop under a routing.
    for figures in (found.measured, found.simulated):
        assert figures.ttft_p50_ms == pytest.approx(20, abs=1)
        assert figures.tpt_mean_ms == pytest.approx((20 + 4 * 11) / 5, rel=0.02)
        assert figures.attainment == 1.0
    assert found.requests == 16, "the first fifth of the time does not count"


def test_each_instance_is_simulated_with_its_own_profile() -> None:
    found = compare(alone(), Calibration((profile(), profile(3.0)), 10.0, ()))
    assert found.simulated.tpt_mean_ms == pytest.approx(2 * 64 / 5, rel=0.02), "one takes 64 ms, the other 192"


def test_the_slo_is_a_multiple_of_the_time_per_token_without_adapters() -> None:
    known = Calibration((profile(),), 1.0, ())
    twice = Calibration((profile(2.0),), 0.5, ())
    assert slo_ms(twice) == pytest.approx(2 * slo_ms(known), rel=0.1)


def probe(size: int, prompt_tokens: int = 16) -> Probe:
    """Returns requests to two idle servers. In the first a prompt token takes 2 ms and a decode iteration 20 ms and
    3 ms for each request, and 45 ms of the time to the first token do not depend on the prompt. The second takes twice
    as long for everything."""
    requests = []
    for instance, times in enumerate((1, 2)):
        first_s, decode_s = times * (0.045 + 0.002 * prompt_tokens * size), times * (0.020 + 0.003 * size)
        requests += [ServedRequest(instance, 0, prompt_tokens, 11, 0.0, first_s, first_s + 10 * decode_s)] * size
    return Probe(2, tuple(requests))


PROBES = (*(probe(1, tokens) for tokens in (8, 32, 64)), *map(probe, (2, 4, 8)))


def test_with_probes_each_machine_takes_the_time_of_its_server() -> None:
    machine, other = machines(Calibration((profile(), profile()), 10.0, PROBES), 2, PROBES)
    assert other.model.beta_ms == pytest.approx(40, abs=0.1)
    assert other.request_ms == pytest.approx(2 * machine.request_ms, abs=0.1)
    model = machine.model
    assert (model.gamma_ms, model.beta_ms) == pytest.approx((3, 20), abs=0.1)
    assert model.prefill_token_ms == pytest.approx(2, abs=0.01)
    assert model.prefill_base_ms == pytest.approx(20, abs=0.1), "twice the profile's, like the time of a token"
    assert machine.request_ms == pytest.approx(25, abs=0.1), "the rest of 45 ms"
    assert machine.beside_prompt_ms == model.prefill_token_ms, "beside prompts its token is like one of theirs"


def test_a_load_is_simulated_by_the_probes_of_its_own_fleet() -> None:
    found = compare(alone(probes=PROBES), Calibration((profile(), profile()), 10.0, ()))
    assert found.simulated.ttft_p50_ms == pytest.approx(1.5 * (45 + 2 * 10), abs=1), "between those of both servers"
    assert found.by_profile.ttft_p50_ms == pytest.approx(20, abs=1)


def test_requests_of_a_busy_server_take_as_long_to_arrive_as_those_of_an_idle_one() -> None:
    (machine,) = machines(Calibration((profile(),), 10.0, ()), 1, ())
    arrivals = tuple(PlannedRequest(n, 0.100 * n, n, 10, 50) for n in range(2))
    first_ms = []
    for request_ms in (0.0, 25.0):
        setting = ClusterSetting((replace(machine, request_ms=request_ms),), "round-robin", math.inf)
        simulation = Simulation(setting, Workload(arrivals, RANKS))
        simulation.run()
        first_ms.append((simulation.requests["first"] - simulation.requests["arrived"]) / MS)
    idle_ms, busy_ms = first_ms[1] - first_ms[0]
    assert idle_ms == pytest.approx(25)
    assert busy_ms >= 25 - 11, "it joins between two iterations of 11 ms"
