"""Changes of adapters over HTTP that depend on versions, aliases and other changes; why folders are not served."""

import asyncio
import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.http.context import HttpTimings
from caraserve.http.management import adapters
from tests.cluster.nodes import until
from tests.http.fleet import View, World
from tests.http.log_lines import logged
from tests.http.managed import serving
from tests.http.serving import Answer, Client
from tests.lora.folders import write_adapter
from tests.lora.uploads import Elsewhere, Receiver, tar_of

WRONG = f'"{"0" * 64}"'
DIGEST_AT_END = re.compile(": [0-9a-f]{64}$")
SIZE = 10_240  # of a body


@pytest.fixture
def bodies(tmp_path: Path) -> list[bytes]:
    return [tar_of(write_adapter(tmp_path / f"made-{alpha}", {"lora_alpha": alpha})) for alpha in (8, 9)]


async def change(client: Client, method: str, bodies: list[bytes], query: str = "", **headers: str) -> Answer:
    """Replaces, labels or deletes the adapter `x`."""
    options: dict[str, Any] = {"PUT": {"data": bodies[1]}, "PATCH": {"json": {"labels": {"n": "1"}}}}.get(method, {})
    return await client.request(method, f"/v1/adapters/x{query}", headers=headers, **options)


def state(receiver: Receiver) -> tuple[str, ...]:
    return tuple(info.digest for info in receiver.catalog.all())


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
async def test_a_change_of_another_version_than_the_client_knows_is_refused(
    tmp_path: Path, bodies: list[bytes], method: str, header: str
) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        etag = (await client.request("PUT", "/v1/adapters/x", data=bodies[0])).headers["ETag"]
        before = state(receiver)
        for tags in (WRONG, f'{WRONG}, {WRONG[:-2]}1"') if header == "If-Match" else ("*", etag, f"{WRONG}, {etag}"):
            answer = await change(client, method, bodies, **{header: tags})
            assert (answer.status, answer.error["code"], answer.error["param"]) == (
                412,
                "adapter_version_differs",
                header,
            )
            assert "nothing was changed" in answer.error["message"]
            assert state(receiver) == before
        assert (await client.get("/v1/adapters/x")).json["labels"] == {}
        malformed = await change(client, method, bodies, **{header: '"abc"'})
        assert (malformed.status, malformed.error["param"]) == (400, header)
        assert "or * for any, not '\"abc\"'" in malformed.error["message"]
        right = f"{WRONG}, {etag}" if header == "If-Match" else WRONG
        assert (await change(client, method, bodies, **{header: right})).status == 200


async def test_the_versions_in_several_lines_of_a_header_are_one_list(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, _):
        etag = (await client.request("PUT", "/v1/adapters/x", data=bodies[0])).headers["ETag"]
        for header, status in (("If-None-Match", 412), ("If-Match", 200)):
            lines = [(header, WRONG), (header, etag)]
            assert (await client.request("DELETE", "/v1/adapters/x", headers=lines)).status == status


async def test_a_change_of_what_is_not_there(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        for method, status in (("PUT", 412), ("PATCH", 404), ("DELETE", 404)):
            assert (await change(client, method, bodies, **{"If-Match": "*"})).status == status
        assert receiver.left() == []
        assert (await change(client, "PUT", bodies, **{"If-None-Match": "*"})).status == 201


async def test_a_version_that_changes_during_an_upload_refuses_it_at_its_end(
    tmp_path: Path, bodies: list[bytes]
) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        etag = (await client.request("PUT", "/v1/adapters/x", data=bodies[0])).headers["ETag"]
        go = asyncio.Event()

        async def body() -> Any:
            yield bodies[1][:1000]
            await go.wait()
            yield bodies[1][1000:]

        upload = asyncio.create_task(client.request("PUT", "/v1/adapters/x", data=body(), headers={"If-Match": etag}))
        await until(lambda: bool(receiver.uploads._under_way))
        third = tar_of(write_adapter(tmp_path / "third", {"lora_alpha": 10}))
        stored = (await client.request("PUT", "/v1/adapters/x", data=third)).json
        go.set()
        assert (await upload).status == 412
        assert (await client.get("/v1/adapters/x")).json["digest"] == stored["digest"]
        await until(lambda: receiver.left() == ["x"])


async def alias(client: Client, name: str = "prod", adapter: str = "x") -> None:
    assert (await client.request("PUT", f"/v1/aliases/{name}", json={"adapter": adapter})).status == 201


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_what_aliases_stand_for_is_replaced_or_deleted_only_by_force(
    tmp_path: Path, bodies: list[bytes], method: str
) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await client.request("PUT", "/v1/adapters/x", data=bodies[0])
        await client.request("PUT", "/v1/adapters/y", data=bodies[0])
        for name, adapter in (("prod", "x"), ("test", "x"), ("other", "y")):
            await alias(client, name, adapter)
        before = state(receiver)
        refused = await change(client, method, bodies)
        assert (refused.status, refused.error["code"], refused.error["param"]) == (409, "adapter_aliased", "force")
        assert "'prod', 'test' stand for 'x'" in refused.error["message"]
        assert state(receiver) == before
        assert (await change(client, method, bodies, "?force=yes")).status == 400
        forced = await change(client, method, bodies, "?force=true")
        assert forced.status == 200
        left = [one["name"] for one in (await client.get("/v1/aliases")).json["data"]]
        if method == "PUT":
            assert left == ["other", "prod", "test"], "they stand for the new version"
        else:
            assert (left, forced.json["aliases_deleted"]) == (["other"], ["prod", "test"])


class Peers(View):
    """A cluster in which another instance has the adapter `x`."""

    def __init__(self) -> None:
        world = World()
        world.names["x"] = RegisteredAdapter("x", "f" * 64, 4, 1000)
        super().__init__("a", world)

    def remove(self, name: str) -> None:
        del self._world.names[name]


async def test_an_adapter_of_another_instance_is_deleted_under_the_same_conditions(
    tmp_path: Path, bodies: list[bytes]
) -> None:
    async with serving(tmp_path / "root", cluster=Peers()) as (client, receiver):
        elsewhere = Elsewhere()
        receiver.uploads._observers = [elsewhere]
        await alias(client)
        for query, headers, status in (
            ("", {}, 409),
            ("?force=true", {"If-Match": WRONG}, 412),
            ("?force=true", {"If-None-Match": "*"}, 412),
            ("?force=true", {"If-Match": f'"{"f" * 64}"'}, 200),
            ("", {}, 404),
        ):
            assert (await change(client, "DELETE", bodies, query, **headers)).status == status
        assert (await client.get("/v1/aliases")).json["data"] == []
        assert elsewhere.removed == [("x", "f" * 64)], "its files go where they are stored"


async def test_the_same_bytes_again_need_no_force(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, _):
        await client.request("PUT", "/v1/adapters/x", data=bodies[0])
        await alias(client)
        assert (await client.request("PUT", "/v1/adapters/x", data=bodies[0])).status == 200


async def test_no_upload_takes_over_the_aliases_of_a_former_adapter(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await client.request("PUT", "/v1/adapters/x", data=bodies[0])
        await alias(client)
        await receiver.catalog.unload("x")
        refused = await change(client, "PUT", bodies)
        assert (refused.status, "'prod' stands for 'x'" in refused.error["message"]) == (409, True)
        assert (await change(client, "PUT", bodies, "?force=true")).status == 201


async def test_an_alias_of_an_adapter_that_is_arriving_stays(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        go = asyncio.Event()

        async def body() -> Any:
            yield bodies[1][:-4000]
            await go.wait()
            yield bodies[1][-4000:]

        headers = {"Content-Length": str(len(bodies[1]))}
        upload = asyncio.create_task(client.request("PUT", "/v1/adapters/x", data=body(), headers=headers))
        await until(lambda: receiver.catalog.find("x") is not None)
        await alias(client)
        go.set()
        assert (await upload).status == 201


async def test_a_change_that_waits_too_long_for_another_is_a_conflict(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await client.request("PUT", "/v1/adapters/x", data=bodies[0])
        receiver.catalog._changes._longest_wait_s = 0.01
        async with receiver.catalog.changing("x"):
            for method in ("PUT", "PATCH", "DELETE"):
                answer = await change(client, method, bodies)
                assert (answer.status, answer.error["code"]) == (409, "adapter_busy")
                assert (answer.headers["Retry-After"], answer.headers["retry-after-ms"]) == ("1", "1000")
            pointing = await client.request("PUT", "/v1/aliases/prod", json={"adapter": "x"})
            assert pointing.status == 409
        assert (await change(client, "DELETE", bodies)).status == 200


async def test_changes_of_one_name_at_once_are_all_made(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        methods = ("PUT", "PATCH", "DELETE", "PUT", "PATCH", "DELETE", "PUT") * 4
        answers = await asyncio.gather(*(change(client, method, bodies) for method in methods))
        assert {answer.status for answer in answers} <= {200, 201, 404}
        assert receiver.left() in ([], ["x"])


async def test_the_log_tells_new_names_from_replaced_ones_and_what_changes_or_goes_with_an_adapter(
    tmp_path: Path, bodies: list[bytes]
) -> None:
    with logged("caraserve.http", lambda record: DIGEST_AT_END.sub("", record.getMessage())) as log:
        async with serving(tmp_path / "root", log_requests=False) as (client, _):
            for body in (bodies[0], bodies[0], bodies[1]):
                await client.request("PUT", "/v1/adapters/x", data=body)
            await client.request("PATCH", "/v1/adapters/x", json={"labels": {}, "stop": [";"]})
            await alias(client)
            await change(client, "DELETE", bodies, "?force=true")
    assert log.all == [
        "adapter x uploaded",
        "adapter x uploaded again, the same version",
        "adapter x replaced",
        "adapter x: labels, stop changed",
        "alias prod stands for x",
        "adapter x deleted, and its aliases 'prod'",
    ]


async def test_a_deletion_says_whether_the_files_stay(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        write_adapter(receiver.root / "own")
        await receiver.catalog.load("own", "own", inplace=False)
        await client.request("PUT", "/v1/adapters/x", data=bodies[0])
        for name, is_kept in (("own", True), ("x", False)):
            answer = await client.request("DELETE", f"/v1/adapters/{name}")
            assert (answer.json["deleted"], answer.json["files_kept"]) == (True, is_kept)
        gone = await client.get("/v1/adapters/own")
        assert "it was unloaded or deleted over HTTP" in gone.error["message"]


async def test_settings_go_with_a_deletion_that_still_waits_for_requests(tmp_path: Path, bodies: list[bytes]) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await client.request("PUT", "/v1/adapters/x", data=bodies[0])
        await change(client, "PATCH", bodies)
        pinned = receiver.catalog.pin("x")
        deletion = asyncio.create_task(change(client, "DELETE", bodies))
        await until(lambda: receiver.catalog.find("x") is None)
        assert (await change(client, "PUT", bodies)).json["labels"] == {}
        receiver.catalog.manager.unpin(pinned)
        assert (await deletion).status == 200


@pytest.mark.parametrize(
    ("least_bytes_per_s", "longest_s", "is_sized", "reason"),
    [
        (1e6, 3600, False, "at least 1000000 bytes/s are needed"),
        (1.0, 0.01, True, f"at least {SIZE * 100} bytes/s are needed"),
        (1.0, 0.01, False, "all of them within 0.01 s"),
    ],
    ids=["least rate", "rate of its size", "longest time"],
)
async def test_an_upload_that_is_too_slow_is_given_up(
    tmp_path: Path,
    bodies: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    least_bytes_per_s: float,
    longest_s: float,
    is_sized: bool,
    reason: str,
) -> None:
    """It has bytes all the time: only their number is too small."""
    monkeypatch.setattr(adapters, "_LEAST_BYTES_PER_S", least_bytes_per_s)
    monkeypatch.setattr(adapters, "_LONGEST_S", longest_s)
    timings = HttpTimings(upload_grace_s=0.02, linger_s=0.1)
    async with serving(tmp_path / "root", timings=timings) as (client, receiver):

        async def body() -> Any:
            for at in range(SIZE):
                yield bodies[1][at : at + 1]
                await asyncio.sleep(0.005)

        headers = {"Content-Length": str(SIZE)} if is_sized else {}
        answer = await client.request("PUT", "/v1/adapters/x", data=body(), headers=headers)
        assert answer.status == 408
        assert "but for 0.02 s at most" in answer.error["message"]
        assert reason in answer.error["message"]
        await until(lambda: receiver.left() == [])


async def test_bytes_that_come_at_once_allow_no_long_silence_afterwards(
    tmp_path: Path, bodies: list[bytes], pass_time: Callable[[float], None]
) -> None:
    timings = HttpTimings(upload_grace_s=5.0, body_s=1000.0, linger_s=0.1)
    async with serving(tmp_path / "root", timings=timings) as (client, receiver):

        async def body() -> Any:
            yield bodies[1][:-1]  # at the least rate, these take far longer than the grace
            await until(lambda: receiver.left() != [])
            pass_time(5.1)
            await asyncio.Event().wait()

        asking = asyncio.create_task(client.request("PUT", "/v1/adapters/x", data=body()))
        answer = await asking
        assert answer.status == 408
        await until(lambda: receiver.left() == [])


async def test_why_a_folder_is_not_served_is_told_to_those_who_may_use_its_name(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    entries = [
        {"name": "ann", "sha256": [sha256(b"ann").hexdigest()], "adapters": ["team-a-*"], "base_model": True},
        {"name": "root", "sha256": [sha256(b"root").hexdigest()], "admin": True},
    ]
    keys.write_text(json.dumps({"keys": entries}))
    async with serving(tmp_path / "root", api_key_file=keys) as (client, receiver):
        for name in ("team-a-x", "team-b-x"):
            receiver.catalog.refused.note(name, "adapter_config.json: use_dora is True")
        ann, root = ({"Authorization": f"Bearer {name}"} for name in ("ann", "root"))
        listed = (await client.get("/v1/adapters", headers=ann)).json["refused"]
        assert [(one["name"], one["object"]) for one in listed] == [("team-a-x", "refused_adapter")]
        assert listed[0]["reason"] == "adapter_config.json: use_dora is True"
        page = (await client.get("/stats/adapters", headers=ann)).json["refused"]
        assert page == {"matching": 1, "folders": listed}
        query = {"contains": "TEAM-B"}
        page = (await client.get("/stats/adapters", headers=root, params=query)).json["refused"]
        assert [one["name"] for one in page["folders"]] == ["team-b-x"]
        assert len((await client.get("/v1/adapters", headers=root)).json["refused"]) == 2
        for name, is_told in (("team-a-x", True), ("team-b-x", False), ("absent", False)):
            for answer in (
                await client.complete(model=name, headers=ann),
                await client.complete(model="org/base", lora_path=name, headers=ann),
                await client.get(f"/v1/adapters/{name}", headers=ann),
                await client.get(f"/v1/models/{name}", headers=ann),
            ):
                assert answer.status == 404
                assert ("use_dora is True" in answer.error["message"]) is is_told


async def test_a_request_for_a_folder_inside_of_a_refused_one_is_told_its_reason(tmp_path: Path) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        write_adapter(receiver.root / "run1" / "checkpoint-500")
        receiver.catalog.refused.note("run1", "only folders directly in --adapters-dir are loaded")
        for model in ("run1/checkpoint-500", "org/base:run1/checkpoint-500", "run1/a/b"):
            message = (await client.complete(model=model)).error["message"]
            assert "The folder 'run1' in --adapters-dir is not served: only folders directly" in message
        assert "run1" not in (await client.complete(model="org/run1")).error["message"].partition(";")[2]


async def test_paths_of_the_server_are_shown_to_admins_alone(tmp_path: Path) -> None:
    async with serving(tmp_path / "root", api_key=("user",), admin_key=("admin",)) as (client, receiver):
        write_adapter(receiver.root / "x")
        await receiver.catalog.load("x", "x", inplace=False)
        await client.request(
            "PUT", "/v1/aliases/prod", json={"adapter": "x"}, headers={"Authorization": "Bearer admin"}
        )
        for key, root in (("user", "x"), ("admin", str(receiver.root / "x"))):
            headers = {"Authorization": f"Bearer {key}"}
            cards = (await client.get("/v1/models", headers=headers)).json["data"]
            assert [card["root"] for card in cards] == ["org/base", root, root]
            assert (await client.get("/v1/models/x", headers=headers)).json["root"] == root
