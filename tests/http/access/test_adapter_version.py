"""Every answer names the version of its adapter, and a client may require one."""

from typing import Any

import pytest

from tests.http.fake_engine import DIGEST, FakeEngine
from tests.http.serving import serving

OTHER = "e" * 64


@pytest.mark.parametrize(("model", "served_by"), [("a", f"a@{DIGEST}"), ("org/base", "org/base")])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_names_its_adapter_and_its_version(model: str, served_by: str, stream: bool) -> None:
    async with serving(FakeEngine()) as client:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        for answer in (
            await client.complete(model=model, stream=stream, **options),
            await client.chat(model=model, stream=stream, **options),
        ):
            assert answer.headers["x-caraserve-adapter"] == served_by
            if stream:
                *_, finish, usage = answer.events
                assert finish["choices"][0]["finish_reason"] is not None
                assert finish["system_fingerprint"] == usage["system_fingerprint"] == served_by
            else:
                assert answer.json["system_fingerprint"] == served_by


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("model", "required", "status"),
    [
        ("a", f'"{DIGEST}"', 200),
        ("a", f'"{OTHER}", "{DIGEST}"', 200),
        ("a", "*", 200),
        ("a", f'"{OTHER}"', 412),
        ("a", f'"{DIGEST[:12]}"', 400),
        ("a", DIGEST, 400),
        ("a", f'W/"{DIGEST}"', 400),
        ("org/base", f'"{DIGEST}"', 412),
    ],
    ids=["same", "one of two", "any", "other", "short", "bare", "weak", "base"],
)
async def test_a_client_may_require_a_version(model: str, required: str, status: int, stream: bool) -> None:
    fake = FakeEngine()
    async with serving(fake) as client:
        answer = await client.complete(model=model, stream=stream, headers={"If-Match": required})
        assert answer.status == status
        if status != 200:
            assert answer.error["param"] == "If-Match"
            assert fake.streams[0].cancels == 1
            assert fake.streams[0].taken == 0
        if status == 412:
            assert answer.error["code"] == "adapter_version_differs"
