"""Requests for several adapters with weights: how they are named, what is refused, and who may use them."""

from typing import Any

import pytest

from caraserve.lora.registry import UPLOADING
from tests.http.fake_engine import FakeAdapter, FakeEngine
from tests.http.serving import OneOff, serving

BASE = "org/base"


@pytest.mark.parametrize(
    ("naming", "adapter"),
    [
        ({"model": "a*0.5+b*0.25"}, "a*0.5+b*0.25"),
        ({"model": " b*.25 + a*5e-1"}, "a*0.5+b*0.25"),
        ({"model": f"{BASE}:b*0.25+a*0.5"}, "a*0.5+b*0.25"),
        ({"lora_path": "b*0.25+a*0.5"}, "a*0.5+b*0.25"),
        ({"lora": [{"id": "b", "scale": 0.25}, {"id": "a", "scale": 0.5}]}, "a*0.5+b*0.25"),
        ({"model": "a*0.5+b*0.25", "lora": [{"id": "b", "scale": 0.25}, {"id": "a", "scale": 0.5}]}, "a*0.5+b*0.25"),
        ({"model": "a+b"}, "a+b"),
        ({"model": "a*-2"}, "a*-2.0"),
        ({"lora": [{"id": "a", "scale": 0.5}]}, "a*0.5"),
        ({"model": "a*1"}, "a"),
        ({"model": "a*0.5+a*0.5"}, "a"),
        ({"model": "a*0.1+a*0.2+a*0.3"}, "a*0.6"),
        ({"model": "a*0.3+a*0.2+a*0.1"}, "a*0.6"),
        ({"model": "a+b*0"}, "a"),
        ({"lora": [{"id": "a", "scale": 0}]}, None),
        ({"model": "a+a*-1"}, None),
    ],
    ids=str,
)
async def test_equal_combinations_have_one_name(naming: dict[str, Any], adapter: str | None) -> None:
    fake = FakeEngine()
    async with serving(fake) as client:
        answers = [await client.complete(**naming), await client.chat(**naming)]
    assert [answer.status for answer in answers] == [200, 200]
    assert [request.adapter for request in fake.requests] == [adapter, adapter]
    assert all("x-caraserve-ignored" not in answer.headers for answer in answers)


@pytest.mark.parametrize(
    ("naming", "status", "says"),
    [
        ({"model": "a*"}, 400, "'a*' is not NAME or NAME*WEIGHT"),
        ({"model": "a*x"}, 400, "'a*x' is not"),
        ({"model": "a**2"}, 400, "'a**2' is not"),
        ({"model": "a*nan"}, 400, "'a*nan' is not"),
        ({"model": "a*1e999"}, 400, "the weights are too large"),
        ({"model": "a*1e308+a*1e308"}, 400, "the weights are too large"),
        ({"model": "a*1e308+a*-1e308+a*1e308"}, 400, "the weights are too large"),
        ({"lora": [{"id": "a", "scale": 1e10}]}, 400, "lora[0].scale must be a number of at most 1e+09"),
        ({"model": "a+"}, 400, "'' is not"),
        ({"model": "+".join(9 * ["a"])}, 400, "9 adapters, and 8 are the most"),
        ({"model": f"a+{BASE}"}, 400, "the base model"),
        ({"model": "a*0.5+c*0.5"}, 400, "here to 516 (a 8, c 508), and 512 is the most"),
        ({"model": "a*0.5+absent*0.5"}, 404, "'absent' does not exist"),
        ({"lora_path": "a*x"}, 400, "'a*x' is not"),
        ({"model": "a*0.5", "lora_path": "a"}, 400, "different adapters"),
    ],
    ids=str,
)
async def test_what_is_no_combination_is_refused(naming: dict[str, Any], status: int, says: str) -> None:
    fake = FakeEngine()
    fake.loaded["c"] = FakeAdapter("c", "/adapters/c", rank=508)
    answer = await OneOff(fake).complete(**naming)
    assert (answer.status, answer.error["param"]) == (status, list(naming)[-1])
    assert says in answer.error["message"]
    assert not fake.streams


async def test_the_base_models_name_may_have_the_marks_of_combinations() -> None:
    fake = FakeEngine(base_name="c++*", other_base_names=("a*2",))
    async with serving(fake) as client:
        for name in ("c++*", "a*2", "c++*:a", "c++*:a*0.5"):
            assert (await client.complete(model=name)).status == 200
    assert [request.adapter for request in fake.requests] == [None, None, "a", "a*0.5"]


async def test_other_routes_know_no_combination() -> None:
    async with serving(FakeEngine()) as client:
        assert (await client.get("/v1/adapters/a*0.5+b*0.5")).status == 404


async def test_an_adapter_that_is_being_uploaded_is_to_be_combined_later() -> None:
    fake = FakeEngine()
    fake.loaded["c"] = FakeAdapter("c", "/adapters/c", rank=8, state=UPLOADING)
    for naming in ({"model": "a+c"}, {"lora_path": "a+c"}):
        answer = await OneOff(fake).complete(**naming)
        assert (answer.status, answer.error["param"]) == (409, next(iter(naming)))
        assert int(answer.headers["Retry-After"]) >= 1
        assert "c is being uploaded" in answer.error["message"]
