"""Serves this instance's adapters to other instances: manifests and ranges of images, over HTTP.

    GET /cluster/adapters/{digest}/manifest     the manifest; its hash is the digest
    GET /cluster/adapters/{digest}?from=&to=    bytes of the image; 404: not held, 503: too many uploads

Images come from the host cache, or are read from disk into memory that is kept for 5 s, so that uploads evict nothing
from the host cache.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.peer_client import check_peer
from caraserve.core.adapter_rules import DIGEST
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import CaraServeError
from caraserve.lora.adapter import Done, Source
from caraserve.lora.manager import AdapterManager
from caraserve.lora.manifest import manifest_of

PATH = "/cluster/adapters"

_SLICE_BYTES = 256 << 10  # written at a time; takes the event loop 0.1 ms
_MAX_UPLOADS = 8
_MAX_READ = 2  # images in memory outside the host cache
_KEPT_S = 5.0
_UPLOAD_S = 60.0  # of a range; a slow reader pins an adapter that long


class UploadsBusy(Exception):
    """Raised when too many adapters are being read for uploads; the peer tries again later."""


@dataclass(slots=True, eq=False)
class _Read:
    image: "asyncio.Future[HostAdapter]"
    users: int = 0


class UploadServer:
    """Serves the adapters that this instance has."""

    def __init__(
        self,
        manager: AdapterManager,
        read: Callable[[Source, NDArray[np.uint8], Done], None],
        on_read_failure: Callable[[str, bool], None],
        keys: Callable[[], Keyring],
    ) -> None:
        """`read`: reads an adapter from this disk. `on_read_failure(digest, is_changed)`: called when a read failed;
        `is_changed`: because the files have other bytes now."""
        self.sent_bytes = self.refusals = 0
        self._manager, self._read, self._on_read_failure, self._keys = manager, read, on_read_failure, keys
        self._uploads = 0
        self._reads: dict[str, _Read] = {}

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes for the port of other instances."""
        digest = f"{PATH}/{{digest:{DIGEST.pattern}}}"
        return [web.get(f"{digest}/manifest", self.manifest), web.get(digest, self.image)]

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        """Handles GET …/manifest: sends an adapter's manifest."""
        async with self._requested_image(request) as image:
            return web.Response(body=manifest_of(image.spec), content_type="application/json")

    async def image(self, request: web.Request) -> web.StreamResponse:
        """Handles GET …?from=&to=: sends the bytes [from, to) of an adapter's image."""
        async with self._requested_image(request) as image:
            start, end = (
                int(text) if text.isdecimal() else -1 for text in map(request.query.get, ("from", "to"), ("", ""))
            )
            if not 0 <= start < end <= image.spec.num_bytes:
                raise web.HTTPRequestRangeNotSatisfiable(text="No such bytes.")
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            response.content_length = end - start
            await response.prepare(request)
            async with asyncio.timeout(_UPLOAD_S):
                for at in range(start, end, _SLICE_BYTES):
                    # A copy: when the peer goes away, unsent bytes outlive the pin on the image.
                    piece = image.data[at : min(end, at + _SLICE_BYTES)].tobytes()
                    await response.write(piece)
                    self.sent_bytes += len(piece)
                await response.write_eof()
            return response

    @asynccontextmanager
    async def _requested_image(self, request: web.Request) -> AsyncIterator[HostAdapter]:
        check_peer(request, self._keys())
        digest = request.match_info["digest"]
        if self._uploads >= _MAX_UPLOADS:
            self.refusals += 1
            raise web.HTTPServiceUnavailable(text="Too many uploads at once.", headers={"Retry-After": "1"})
        self._uploads += 1
        try:
            async with self.image_of(digest) as image:
                yield image
        except UploadsBusy:
            self.refusals += 1
            raise web.HTTPServiceUnavailable(text="Too many uploads at once.", headers={"Retry-After": "1"}) from None
        except CaraServeError as error:
            raise web.HTTPNotFound(text=error.message) from None
        finally:
            self._uploads -= 1

    @asynccontextmanager
    async def image_of(self, digest: str) -> AsyncIterator[HostAdapter]:
        """Yields an adapter's image, pinned in memory meanwhile. Raises UploadsBusy, or the error of reading it."""
        version = self._manager.find(digest)
        if version is None:
            raise CaraServeError(f"This instance does not have {digest}.")
        version.pins += 1
        try:
            image = self._manager.image(digest)
            if image is None:
                async with self._from_disk(digest, version.source, version.num_bytes) as image:
                    yield image
                return
            self._manager.pin_image(version)
            try:
                yield image
            finally:
                self._manager.unpin_image(version)
        finally:
            self._manager.unpin(version)

    @asynccontextmanager
    async def _from_disk(self, digest: str, source: Source, num_bytes: int) -> AsyncIterator[HostAdapter]:
        entry = self._reads.get(digest) or self._start_read(digest, source, num_bytes)
        entry.users += 1
        try:
            yield await asyncio.shield(entry.image)
        finally:
            entry.users -= 1
            has_failed = entry.image.done() and entry.image.exception() is not None
            asyncio.get_running_loop().call_later(0.0 if has_failed else _KEPT_S, self._evict, digest, entry)

    def _start_read(self, digest: str, source: Source, num_bytes: int) -> _Read:
        for other, old in [*self._reads.items()][: max(0, len(self._reads) - _MAX_READ + 1)]:
            self._evict(other, old)
        if len(self._reads) >= _MAX_READ:
            raise UploadsBusy
        entry = self._reads[digest] = _Read(asyncio.get_running_loop().create_future())

        def done(result: HostAdapter | CaraServeError) -> None:
            if isinstance(result, HostAdapter) and result.spec.digest == digest:
                entry.image.set_result(result)
            else:
                is_changed = isinstance(result, HostAdapter)
                error = CaraServeError("Its files have changed.") if isinstance(result, HostAdapter) else result
                entry.image.set_exception(error)
                entry.image.exception()  # retrieved, so that asyncio does not log it: its users may have gone
                self._on_read_failure(digest, is_changed)
            self._evict(digest, entry)

        self._read(source, aligned_bytes(num_bytes), done)
        return entry

    def _evict(self, digest: str, entry: _Read) -> None:
        if entry.users == 0 and entry.image.done() and self._reads.get(digest) is entry:
            del self._reads[digest]
