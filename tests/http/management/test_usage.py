"""Tests of GET /v1/usage: who sees which rows."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.request import Finish, GenerateRequest, Phases, SamplingParams
from caraserve.core.tenant import Tenant
from tests.http.fake_engine import FakeEngine, spell
from tests.http.serving import OneOff, new_metrics, serving

USES = [("team-a", "sql"), ("team-a", None), ("team-b", "sql")]


async def rows(
    headers: dict[str, str], uses: Sequence[tuple[str, str | None]] = USES, **settings: Any
) -> list[dict[str, Any]]:
    """Returns the rows that a client with these headers gets after one request for each of `uses`."""
    metrics = new_metrics()
    for client, adapter in uses:
        request = GenerateRequest("id", (1, 2, 3), adapter, SamplingParams(), 0.0, Tenant(client))
        metrics.observe_request(request, Finish("stop", 3, 4, 2, Phases(1.0, 0.0, 1.0, 1.0)), 0.1)
    answer = await OneOff(metrics=metrics, **settings).get("/v1/usage", headers=headers)
    assert (answer.json["object"], answer.json["since"] > 0) == ("list", True)
    found: list[dict[str, Any]] = answer.json["data"]
    return found


def keys(path: Path) -> Path:
    names = {"team-a": False, "team-b": False, "team-c": False, "boss": True}
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "admin": admin}
        for name, admin in names.items()
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path


@pytest.mark.parametrize(("key", "seen"), [("boss", USES), ("team-a", USES[:2]), ("team-b", USES[2:]), ("team-c", [])])
async def test_a_key_sees_its_own_use_and_an_admin_everybodys(
    tmp_path: Path, key: str, seen: list[tuple[str, str | None]]
) -> None:
    found = await rows({"X-Api-Key": key}, api_key_file=keys(tmp_path / "keys.json"))
    assert [(row["client"], row["adapter"]) for row in found] == seen
    counts = {"requests": 1, "prompt_tokens": 3, "cached_tokens": 2, "output_tokens": 4, "failures": 0}
    assert all(row == {"client": row["client"], "adapter": row["adapter"], **counts} for row in found)


async def test_the_rows_of_others_are_passed_over_in_turns_of_the_event_loop(
    tmp_path: Path, rests: list[float]
) -> None:
    others = [("team-b", f"a{number}") for number in range(20_000)]
    assert await rows({"X-Api-Key": "team-a"}, others, api_key_file=keys(tmp_path / "keys.json")) == []
    assert rests


async def test_without_keys_everybody_sees_everything() -> None:
    assert len(await rows({})) == len(USES)


async def test_several_answers_to_a_prompt_count_it_once_and_are_one_in_vllms_histograms() -> None:
    fake = FakeEngine(script=lambda request: spell(request, "Hi!" if request.request_id.endswith("1") else "H"))
    async with serving(fake) as client:
        assert (await client.complete(prompt=["ab", "cd"], n=3)).status == 200
        page = (await client.get("/metrics")).body.decode()
    assert [request.counts_prompt for request in fake.requests] == [True, False, False] * 2
    sums = dict(re.findall(r"^(vllm:request_\w+)_sum{.*} (\S+)$", page, flags=re.MULTILINE))
    assert (sums["vllm:request_params_n"], sums["vllm:request_max_num_generation_tokens"]) == ("6.0", "4.0")
