"""Removals of uploaded files that other instances ask for."""

import asyncio
from typing import Any, cast

import pytest

from caraserve.cluster.transfer.upload_removal import REMOVE_QUESTION, UploadRemoval


class Uploads:
    """Records the names of the adapters that it should discard."""

    def __init__(self) -> None:
        self.discarded: list[str] = []

    async def discard(self, name: str, digest: str) -> None:
        self.discarded.append(name)


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
