"""An adapter that is uploaded to one `caraserve serve` process takes requests on all of its fleet while it arrives."""

import hashlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft_fields import CONFIG_NAME
from tests.lora.uploads import left_in
from tests.processes import Server, fleet, free_ports, tiny_adapter, until

Reply = tuple[int, str | None, Any]  # status, x-caraserve-adapter, body


class Upload:
    """A PUT of an adapter of which the last byte is sent by `finish`."""

    def __init__(self, server: Server, name: str, folder: Path, sha256: str | None = None) -> None:
        self._body = (folder / TENSORS_NAME).read_bytes()
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        config = quote((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        self._connection.putrequest("PUT", f"/v1/adapters/{name}?config={config}")
        self._connection.putheader("Content-Length", str(len(self._body)))
        self._connection.putheader("x-content-sha256", sha256 or hashlib.sha256(self._body).hexdigest())
        self._connection.endheaders(self._body[:-1])

    def finish(self) -> tuple[int, Any]:
        self._connection.send(self._body[-1:])
        response = self._connection.getresponse()
        answer = response.status, json.loads(response.read())
        self.close()
        return answer

    def close(self) -> None:
        self._connection.close()


def whole(server: Server, name: str, folder: Path) -> str:
    """Uploads an adapter, and returns its digest."""
    status, card = Upload(server, name, folder).finish()
    assert status in (200, 201), card
    return str(card["digest"])


def send(server: Server, method: str, path: str, body: object = None, **headers: str) -> Reply:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json", **headers}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["x-caraserve-adapter"], json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, None, json.loads(error.read())["error"]["code"]


def complete(server: Server, name: str, **headers: str) -> Reply:
    asked = {"model": name, "prompt": "The sea is", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, served_by, body = send(server, "POST", "/v1/completions", asked, **headers)
    return status, served_by, body["choices"][0]["text"] if status == 200 else body


def known(server: Server, name: str) -> bool:
    return send(server, "GET", f"/v1/adapters/{name}")[0] == 200


def waiting(pool: ThreadPoolExecutor, servers: Sequence[Server], receiver: Server, name: str) -> list[Future[Reply]]:
    """Sends a request to each server, and returns when the one that receives the upload has admitted all of them."""
    requests = [pool.submit(complete, server, name) for server in servers]
    until(lambda: send(receiver, "GET", f"/v1/adapters/{name}")[2]["requests"] == len(servers), 5)
    return requests


def test_an_upload_takes_requests_on_all_instances_while_it_arrives(tmp_path: Path) -> None:
    sea, ice = (tiny_adapter(tmp_path / name, seed) for seed, name in enumerate(("sea", "ice")))
    roots = {name: tmp_path / f"{name} folders" for name in "ab"}
    for root in roots.values():
        root.mkdir()

    def own(name: str) -> tuple[str, ...]:
        return ("--adapters-dir", str(roots[name]), "--routing", "local")

    def left(name: str) -> list[str]:
        return left_in(roots[name])

    with fleet(free_ports(2), tmp_path, own) as servers, ThreadPoolExecutor(4) as pool:
        a, b = both = tuple(servers.values())
        until(lambda: b.states() == {"a": "alive", "b": "alive"}, 5)

        upload = Upload(a, "new", sea)
        until(lambda: known(b, "new"), 5)
        requests = waiting(pool, both, a, "new")
        assert Upload(b, "new", ice).finish()[0] == 409, "an upload of the name is under way on another instance"
        assert send(b, "DELETE", "/v1/adapters/new")[0] == 409
        status, card = upload.finish()
        assert status == 201
        replies = [request.result(60) for request in requests]
        assert replies[0] == replies[1]
        assert replies[0][:2] == (200, f"new@{card['digest']}")
        until(lambda: send(b, "GET", "/v1/adapters/new")[2]["digest"] == card["digest"], 5)
        assert complete(b, "new", **{"If-Match": f'"{card["digest"]}"'}) == replies[0], "computed by b itself"
        assert b.metric('caraserve:adapter_fetches_total{outcome="ok"') == 1

        upload = Upload(a, "bad", sea, sha256="0" * 64)
        until(lambda: known(b, "bad"), 5)
        requests = waiting(pool, both, a, "bad")
        assert upload.finish()[0] == 400
        assert [request.result(60) for request in requests] == [(503, None, "adapter_unavailable")] * 2
        until(lambda: not known(b, "bad"), 5)
        assert [complete(server, "bad") for server in both] == [(404, None, "model_not_found")] * 2
        assert (left("a"), left("b")) == (["new"], [])

        digest = whole(b, "new", ice)
        assert left("b") == ["new"]
        until(lambda: left("a") == [], 5)
        until(lambda: complete(a, "new")[1] == f"new@{digest}", 5)
        one, other = (complete(server, "new") for server in both)
        assert one == other != replies[0]
        status, _, deleted = send(a, "DELETE", "/v1/adapters/new")
        assert (status, deleted["files_kept"]) == (200, False), "b has removed them, as they were uploaded"
        until(lambda: not known(b, "new"), 5)
        until(lambda: left("b") == [], 5)

        upload = Upload(a, "late", sea)
        until(lambda: known(b, "late"), 5)
        requests = waiting(pool, [b], a, "late")
        a.process.kill()
        assert requests[0].result(60) == (503, None, "adapter_unavailable")
        upload.close()
        until(lambda: b.states()["a"] == "dead", 5)
        assert complete(b, "late") == (404, None, "model_not_found")
        assert whole(b, "late", ice) == digest
        assert complete(b, "late")[2] == one[2]
