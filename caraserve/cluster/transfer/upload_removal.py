"""Removes an uploaded adapter's files on the instance that stores them, when another one has deleted or replaced it.

    DELETE or PUT here ─► the registry, by which all instances change the name
                       └► a query to every live instance ─► it removes the folder, if it has one that was uploaded

Each instance answers whether it keeps files of the name, because they were not uploaded.

An adapter that was only unloaded keeps its files. So do those on an instance that cannot be reached: its next upload or
deletion of the name removes them.
"""

import asyncio

from caraserve.cluster.membership.member import Member, QueryBody
from caraserve.core.adapter_rules import ADAPTER_NAME
from caraserve.lora.uploads import AdapterUploads
from caraserve.util.tasks import Tasks

REMOVE_QUERY = "remove-upload"  # kind of a query: (REMOVE_QUERY, name, digest that it stood for)
_KEPT = "kept"
_ANSWER_S = 1.0


class UploadRemoval:
    """The removals that this instance asks for, and those that others ask of it."""

    def __init__(self, member: Member, uploads: AdapterUploads) -> None:
        self._member, self._uploads = member, uploads
        self._tasks = Tasks()

    async def close(self) -> None:
        """Ends all work in progress."""
        await self._tasks.end()

    def removed(self, name: str, digest: str) -> "asyncio.Task[bool]":
        """Observes the uploads: asks every other instance to remove the files of a digest that the name stood for. The
        task's result is whether one of them has answered that it keeps files of the name."""
        return self._tasks.start(self._ask_all(name, digest), f"removal of {name} elsewhere")

    async def _ask_all(self, name: str, digest: str) -> bool:
        body = (REMOVE_QUERY, name, digest)
        peers = [record.name for record in self._member.live()[1:]]
        return (_KEPT,) in await asyncio.gather(*(self._member.query(peer, body, _ANSWER_S) for peer in peers))

    def answer(self, peer: str, body: QueryBody) -> QueryBody:
        """Answers another instance, and begins the removal."""
        match body:
            case (_, str(name), str(digest)) if ADAPTER_NAME.fullmatch(name):  # no other folder of this machine
                self._tasks.start(self._uploads.discard(name, digest), f"removal of {name}")
                return (_KEPT,) if self._uploads.keeps_files(name) else ()
        return ()
