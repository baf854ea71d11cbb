"""The fork server ends without an error when the server dies while a worker is forked."""

import json
import os
import socket
from typing import Any

import pytest

from caraserve.cpu.lora_workers import fork_server

NO_PID = 1 << 22  # larger than any on Linux


@pytest.mark.parametrize("pid", [os.getpid(), NO_PID], ids=["worker", "dead worker"])
@pytest.mark.parametrize("died_when_asked", [True, False])
def test_a_server_that_has_died_is_no_error(monkeypatch: pytest.MonkeyPatch, pid: int, died_when_asked: bool) -> None:
    server, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    region: Any = None
    server.send(json.dumps({"worker": 0, "core": 0, "offset": 0}).encode())
    forks = 0

    def fork(*place: object) -> int:
        nonlocal forks
        forks += 1
        server.close()
        return pid

    monkeypatch.setattr(fork_server, "_fork_worker", fork)
    if died_when_asked:
        server.close()
    with connection:
        fork_server._serve(connection, region)
    assert forks == 1
