"""Exports spans to an OpenTelemetry collector: OTLP over HTTP, in JSON.

Spans are encoded when they end, which takes some 10 µs each, and wait in a bounded queue for a task that sends them.
What does not fit, and what the collector does not take, is dropped and counted.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from caraserve import __version__
from caraserve.telemetry.prometheus import family

log = logging.getLogger("caraserve.http")

_MOST_WAITING = 4096  # spans, of about 1 kB
_BATCH = 512  # spans in one request
_PAUSE_S = 5.0  # after which spans are sent, however few
_SEND_S = 10.0
_LAST_SEND_S = 2.0  # when the server stops
_DEFAULT_PATH = "/v1/traces"

Value = str | int | float | bool


def attributes(values: Mapping[str, Value | None]) -> list[dict[str, Any]]:
    """Returns values in OTLP's form, without those that are None."""
    return [{"key": key, "value": _encoded(value)} for key, value in values.items() if value is not None]


def _encoded(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits, as protobuf's JSON has them
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


class OtlpExporter:
    """Sends spans to one endpoint."""

    def __init__(self, endpoint: str, instance: str) -> None:
        """`endpoint`: the URL; without a path, the standard one is used. `instance`: the name of this server."""
        self._url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _DEFAULT_PATH
        resource = {"service.name": "caraserve", "service.version": __version__, "service.instance.id": instance}
        self._head = b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":{"name":"caraserve"},"spans":[' % (
            orjson.dumps({"attributes": attributes(resource)})
        )
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SEND_S))
        self._exported = self._dropped = 0
        self._is_failing = False

    def add(self, span: Mapping[str, Any]) -> None:
        """Queues an ended span, in OTLP's form. Never waits."""
        if len(self._waiting) >= _MOST_WAITING:
            self._dropped += 1
            return
        self._waiting.append(orjson.dumps(span))
        if len(self._waiting) >= _BATCH:
            self._wake.set()

    async def run(self) -> None:
        """Sends spans in batches, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._send()

    async def close(self) -> None:
        """Sends what still waits, for at most two seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SEND_S):
                while self._waiting:
                    await self._send()
        await self._session.close()

    def families(self, labels: str) -> Iterator[str]:
        """Yields the families for GET /metrics."""
        counts = {"exported": self._exported, "dropped": self._dropped}
        samples = [(f'outcome="{outcome}",{labels}', count) for outcome, count in counts.items()]
        yield family(
            "caraserve:trace_spans_total", "counter", "Spans by whether the collector has taken them.", samples
        )

    async def _send(self) -> None:
        count = min(_BATCH, len(self._waiting))
        spans = [self._waiting.popleft() for _ in range(count)]
        body = self._head + b",".join(spans) + b"]}]}]}"
        failure = ""
        try:
            async with self._session.post(self._url, data=body, headers={"Content-Type": "application/json"}) as answer:
                if answer.status >= 300:
                    failure = f"status {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"[:200]
        finally:
            self._dropped += count  # also when this is cancelled
        if not failure:
            self._dropped -= count
            self._exported += count
        elif not self._is_failing:
            log.warning("spans cannot be exported to %s and are dropped: %s", self._url, failure)
        self._is_failing = bool(failure)
