"""Places for uploads: a client's slow ones leave places for others, and those that wait get theirs in order."""

import asyncio

import pytest

from caraserve.errors import ServerBusy
from caraserve.lora import upload_places
from caraserve.lora.upload_places import UploadPlaces
from tests.cluster.nodes import until


class Uploads:
    """Uploads that end when the test says so."""

    def __init__(self, longest_wait_s: float = 30.0) -> None:
        self.places, self.under_way = UploadPlaces(longest_wait_s), list[str]()
        self.ends: dict[str, asyncio.Event] = {}

    def begin(self, name: str) -> "asyncio.Task[None]":
        """Begins an upload; the first letter of its name is its client."""
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._upload(name))

    async def _upload(self, name: str) -> None:
        async with self.places.taken(name[0]):
            self.under_way.append(name)
            await self.ends[name].wait()
            self.under_way.remove(name)


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_places, "_MOST_UPLOADS", 3)
    monkeypatch.setattr(upload_places, "_MOST_OF_CLIENT", 2)


async def test_a_client_that_has_all_of_its_places_does_not_hold_up_another() -> None:
    uploads = Uploads()
    tasks = [uploads.begin(name) for name in ("a1", "a2", "a3", "b1", "c1")]
    await until(lambda: uploads.under_way == ["a1", "a2", "b1"])
    uploads.ends["a1"].set()  # the place is for the one that has waited longest
    await until(lambda: uploads.under_way == ["a2", "b1", "a3"])
    tasks[4].cancel()
    await asyncio.wait([tasks[4]])
    for name in ("a2", "a3", "b1"):
        uploads.ends[name].set()
    await asyncio.gather(*tasks[:4])
    assert (uploads.places._of_client.total(), uploads.places._waiting) == (0, [])


async def test_an_upload_that_waits_too_long_is_refused() -> None:
    uploads = Uploads(longest_wait_s=0.01)
    tasks = [uploads.begin(name) for name in ("a1", "a2")]
    await until(lambda: uploads.under_way == ["a1", "a2"])
    with pytest.raises(ServerBusy, match="2 by this client"):
        await uploads.begin("a3")
    for name in ("a1", "a2"):
        uploads.ends[name].set()
    await asyncio.gather(*tasks)
    assert uploads.places._waiting == []


async def test_the_uploads_of_a_client_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_places, "_MOST_WAITING", 1)
    uploads = Uploads()
    tasks = [uploads.begin(name) for name in ("a1", "a2", "a3")]
    await until(lambda: len(uploads.places._waiting) == 1)
    with pytest.raises(ServerBusy):
        await uploads.begin("a4")
    for name in ("a1", "a2", "a3"):
        uploads.ends[name].set()
    await asyncio.gather(*tasks)
