"""Reads from a CaraServe server's metrics how many adapters it has loaded."""

import re
from dataclasses import dataclass

import aiohttp

from caraserve.bench.client.endpoint import Endpoint

_SAMPLE = re.compile(r"^caraserve:adapter_loads_(total|under_way)\{[^}]*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class AdapterLoads:
    """Loads since the server's start. `ended`: to the device; `under_way`: also from disk to host memory."""

    ended: int
    under_way: int


async def adapter_loads(endpoint: Endpoint) -> AdapterLoads:
    """Returns the loads of a server that the benchmark has started. Raises OSError if it does not answer."""
    headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"http://{endpoint.host_header}{endpoint.prefix}/metrics"
    try:
        async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as session, session.get(url) as answer:
            samples = _SAMPLE.findall(await answer.text())
    except aiohttp.ClientError as error:
        raise OSError(f"{url}: {error}") from error
    counts = {"total": 0, "under_way": 0}
    for name, count in samples:
        counts[name] += int(float(count))
    return AdapterLoads(counts["total"], counts["under_way"])
