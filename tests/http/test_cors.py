"""Tests that web pages of other origins can use the server only if the operator has allowed them."""

import pytest

from caraserve.errors import BackendFailed
from tests.http.fake_engine import FakeEngine
from tests.http.serving import OneOff, serving

CHAT, EVIL = "https://chat.example", "https://evil.example"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/models/a"])
async def test_a_preflight_is_answered_without_a_key(path: str) -> None:
    answer = await OneOff(api_key=("k",), allowed_origins=(CHAT,)).request(
        "OPTIONS", path, headers=ASK | {"Origin": CHAT}
    )
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == CHAT
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
    assert "Origin" in answer.headers["Vary"]


@pytest.mark.parametrize("origins", [(), (CHAT,)])
async def test_other_origins_are_allowed_nothing(origins: tuple[str, ...]) -> None:
    async with serving(FakeEngine(), api_key=("k",), allowed_origins=origins) as client:
        asked = await client.request("OPTIONS", "/v1/models", headers=ASK | {"Origin": EVIL})
        got = await client.get("/v1/models", headers={"Origin": EVIL, "Authorization": "Bearer k"})
    assert (asked.status, got.status) == (401, 200)
    assert not [name for answer in (asked, got) for name in answer.headers if name.lower().startswith("access-")]


async def test_answers_streams_and_errors_may_be_read_by_the_page() -> None:
    fake = FakeEngine(refusals={2: BackendFailed("boom")})
    async with serving(fake, api_key=("k",), allowed_origins=(CHAT,)) as client:
        headers = {"Origin": CHAT, "Authorization": "Bearer k"}
        answers = [
            await client.complete(headers=headers),
            await client.complete(headers=headers, stream=True),
            await client.complete(headers=headers),
            await client.complete(headers=headers, temperature=-1),
            await client.get("/v1/models", headers={"Origin": CHAT}),
        ]
    assert [answer.status for answer in answers] == [200, 200, 500, 400, 401]
    for answer in answers:
        assert answer.headers["Access-Control-Allow-Origin"] == CHAT
        assert "Origin" in answer.headers["Vary"]
        assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]


async def test_a_star_allows_all_pages() -> None:
    async with serving(FakeEngine(), api_key=("k",), allowed_origins=("*",)) as client:
        for origin in (CHAT, EVIL, "null"):
            answer = await client.request("OPTIONS", "/v1/models", headers=ASK | {"Origin": origin})
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, "*")


async def test_an_allowed_page_may_use_a_local_server_without_keys_and_others_still_may_not() -> None:
    async with serving(FakeEngine(), allowed_origins=(CHAT,)) as client:
        assert (await client.complete(headers={"Origin": CHAT})).status == 200
        assert (await client.complete(headers={"Origin": EVIL})).status == 403


async def test_options_without_a_preflight_header_is_method_not_allowed() -> None:
    assert (
        await OneOff(allowed_origins=(CHAT,)).request("OPTIONS", "/v1/models", headers={"Origin": CHAT})
    ).status == 405
