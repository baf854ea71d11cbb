"""Removals of uploaded files that other instances ask for."""

import asyncio
from typing import Any, cast

import pytest

from caraserve.cluster.membership.member import QueryBody
from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.transfer.upload_removal import REMOVE_QUERY, UploadRemoval


class Uploads:
    """Records the names of the adapters that it should discard."""

    def __init__(self) -> None:
        self.discarded: list[str] = []

    async def discard(self, name: str, digest: str) -> None:
        self.discarded.append(name)

    def keeps_files(self, name: str) -> bool:
        return name == "own"


@pytest.mark.parametrize(
    ("name", "discarded"),
    [("sql", ["sql"]), ("../other/sql", []), ("/srv/sql", []), ("..", []), ("", [])],
    ids=["name", "relative", "absolute", "parent", "empty"],
)
async def test_no_instance_can_name_a_folder_outside_the_root(name: str, discarded: list[str]) -> None:
    uploads = Uploads()
    removal = UploadRemoval(cast(Any, None), cast(Any, uploads))
    assert removal.answer("b", (REMOVE_QUERY, name, "f" * 64)) == ()
    await asyncio.sleep(0)  # for what has begun
    await removal.close()
    assert uploads.discarded == discarded


class Cluster:
    """A cluster in which each peer gives one answer, None if it gives none in time."""

    def __init__(self, *answers: QueryBody | None) -> None:
        self._answers = {f"peer {number}": answer for number, answer in enumerate(answers)}

    def live(self) -> list[MemberRecord]:
        return [MemberRecord(name, f"{name}:1", 1, 0, MemberState.ALIVE) for name in ("me", *self._answers)]

    async def query(self, peer: str, body: QueryBody, timeout_s: float) -> QueryBody | None:
        return self._answers[peer]


async def test_a_deletion_learns_whether_another_instance_keeps_files_of_the_name() -> None:
    there = UploadRemoval(cast(Any, None), cast(Any, Uploads()))
    own, sent = (there.answer("b", (REMOVE_QUERY, name, "f" * 64)) for name in ("own", "sent"))
    for answers, is_kept in (((None, sent, own), True), ((sent, None), False), ((), False)):
        here = UploadRemoval(cast(Any, Cluster(*answers)), cast(Any, None))
        assert await here.removed("x", "f" * 64) is is_kept
    await there.close()
