"""Removals of uploaded files that other instances ask for."""

import asyncio
from typing import Any, cast

import pytest

from caraserve.cluster.membership.node import QueryBody
from caraserve.cluster.transfer.upload_removal import REMOVE_QUESTION, UploadRemoval


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
    uploads, no_node = Uploads(), cast(Any, None)
    removal = UploadRemoval(no_node, cast(Any, uploads))
    assert removal.answer((REMOVE_QUESTION, name, "f" * 64)) == ()
    await asyncio.sleep(0)  # for what has begun
    await removal.close()
    assert uploads.discarded == discarded


class Node:
    """A cluster in which each peer gives one answer, None if it gives none in time."""

    def __init__(self, *answers: QueryBody | None) -> None:
        self._answers = answers
        self.protocol = self.members = self

    def live(self) -> range:
        return range(len(self._answers))

    async def query(self, peer: int, body: QueryBody, timeout_s: float) -> QueryBody | None:
        return self._answers[peer]


async def test_a_deletion_learns_whether_another_instance_keeps_files_of_the_name() -> None:
    there = UploadRemoval(cast(Any, None), cast(Any, Uploads()))
    own, sent = (there.answer((REMOVE_QUESTION, name, "f" * 64)) for name in ("own", "sent"))
    for answers, is_kept in (((None, sent, own), True), ((sent, None), False), ((), False)):
        here = UploadRemoval(cast(Any, Node(*answers)), cast(Any, None))
        assert await here.removed("x", "f" * 64) is is_kept
    await there.close()
