"""/v1/adapters: cards, uploads and their headers, and who may change adapters."""

import base64
import hashlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from caraserve.http.context import HttpTimings
from tests.http.managed import serving
from tests.http.serving import exchange
from tests.lora.folders import write_adapter
from tests.lora.uploads import tar_of


@pytest.fixture
def body(tmp_path: Path) -> bytes:
    return tar_of(write_adapter(tmp_path / "made"))


def sha256(body: bytes) -> dict[str, str]:
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return {"Content-Digest": f"sha-512=:AA==:, sha-256=:{digest}:"}


async def test_an_uploaded_adapter_is_shown_listed_and_deleted(tmp_path: Path, body: bytes) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        made = await client.request("PUT", "/v1/adapters/sql-v7", data=body, headers=sha256(body))
        assert made.status == 201
        card = {
            "name": "sql-v7",
            "object": "adapter",
            "digest": receiver.catalog.get("sql-v7").digest,
            "rank": 4,
            "bytes": receiver.catalog.get("sql-v7").num_bytes,
            "created": int(receiver.catalog.get("sql-v7").created_s),
            "tier": "disk",
            "requests": 0,
            "pinned": None,
            "labels": {},
            "trained_on": None,
            "other_base": False,
            "added_tokens": 0,
            "own_chat_template": False,
            "num_classes": 0,
        }
        nothing = dict.fromkeys(("chat_template", "stop", "sampling", "folder_chat_template"))
        full_card = card | nothing | {"target_modules": ["q_proj"]}
        assert made.json == full_card | {"skipped_files": []}
        assert (await client.get("/v1/adapters/sql-v7")).json == full_card
        assert (await client.get("/v1/adapters")).json == {"object": "list", "data": [card], "refused": []}
        assert (await client.request("PUT", "/v1/adapters/sql-v7", data=body)).status == 200
        assert (await client.request("DELETE", "/v1/adapters/sql-v7")).json["deleted"] is True
        assert receiver.left() == []
        gone = await client.get("/v1/adapters/sql-v7")
        assert (gone.status, gone.error["param"]) == (404, "name")
        assert (await client.request("DELETE", "/v1/adapters/sql-v7")).status == 404


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-content-sha256", "0" * 64),
        ("x-content-sha256", "0" * 63),
        ("Content-Digest", f"sha-256=:{base64.b64encode(bytes(32)).decode()}:"),
        ("Content-Digest", "sha-512=:AA==:"),
        ("Content-Digest", "sha-256=:A:"),
    ],
    ids=["wrong hex", "short hex", "wrong", "other", "malformed"],
)
async def test_a_wrong_or_malformed_checksum_is_refused_by_its_header(
    tmp_path: Path, body: bytes, header: str, value: str
) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        answer = await client.request("PUT", "/v1/adapters/new", data=body, headers={header: value})
        assert (answer.status, answer.error["param"]) == (400, header)
        assert receiver.left() == []


@pytest.mark.parametrize(
    ("path", "options", "status", "param"),
    [
        ("/v1/adapters/base", {}, 400, "name"),
        ("/v1/adapters/.hidden", {}, 400, "name"),
        ("/v1/adapters/..%2Fx", {}, 400, "name"),
        ("/v1/adapters/new?config=1", {}, 400, "config"),
        ("/v1/adapters/new", {"headers": {"Content-Encoding": "gzip"}}, 415, None),
    ],
)
async def test_refused_uploads(
    tmp_path: Path, body: bytes, path: str, options: dict[str, Any], status: int, param: str | None
) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        async with client.session.put(
            aiohttp.client.URL(client.url + path, encoded=True), data=body, **options
        ) as answer:
            assert answer.status == status
            error = (await answer.json())["error"]
            assert (set(error), error["param"]) == ({"message", "type", "param", "code"}, param)
        assert receiver.left() == []


async def test_a_body_that_stops_arriving_is_given_up(tmp_path: Path, body: bytes) -> None:
    async with serving(tmp_path / "root", timings=HttpTimings(body_s=0.1, linger_s=0.1)) as (client, receiver):
        head = f"PUT /v1/adapters/new HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = await exchange(client.port, head.encode() + body[:2000])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert receiver.left() == []


async def test_only_an_admin_key_changes_adapters_and_any_key_reads_them(tmp_path: Path, body: bytes) -> None:
    async with serving(tmp_path / "root", api_key=("user",), admin_key=("admin",)) as (client, _):
        user, admin = ({"Authorization": f"Bearer {key}"} for key in ("user", "admin"))
        for method in ("PUT", "DELETE"):
            refused = await client.request(method, "/v1/adapters/new", data=body, headers=user)
            assert (refused.status, refused.error["type"]) == (403, "permission_error")
        assert (await client.request("PUT", "/v1/adapters/new", data=body, headers=admin)).status == 201
        assert (await client.get("/v1/adapters/new", headers=user)).status == 200
        assert (await client.get("/v1/adapters/new")).status == 401


async def test_changing_adapters_can_be_switched_off(tmp_path: Path, body: bytes) -> None:
    async with serving(tmp_path / "root", allow_lora_updates=False) as (client, receiver):
        assert (await client.request("PUT", "/v1/adapters/new", data=body)).status == 403
        assert receiver.left() == []
