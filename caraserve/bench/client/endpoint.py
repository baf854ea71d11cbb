"""Finds out an endpoint's address, dialect, base model and adapters, and how many of them a server has loaded."""

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from caraserve.bench.client.dialects import Dialect, LlamaCpp, OpenAIChat, OpenAICompletions
from caraserve.errors import ConfigError

_PATIENCE_S = 10.0
_LOADS = re.compile(r"^caraserve:adapter_loads_(total|under_way)\{[^}]*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint to which requests can be sent."""

    root: str  # of its paths, as http://host:port, without a trailing slash
    tls: ssl.SSLContext | None
    headers: Mapping[str, str]  # of every request
    base_model: str
    adapters: tuple[str, ...]
    unlisted: tuple[str, ...]  # those of `adapters` that it does not list; a gateway may serve them all the same
    ranks: Mapping[str, int]  # of the adapters for which the server lists a rank
    max_model_len: int | None  # tokens of prompt and output together; None: the server lists no limit
    dialect: Dialect


@dataclass(frozen=True, slots=True)
class AdapterLoads:
    """Loads since the server's start. `ended`: to the device; `under_way`: also from disk to host memory."""

    ended: int
    under_way: int


async def find_endpoint(url: str, backend: str, api_key: str | None, adapters: Sequence[str] | None) -> Endpoint:
    """Requests the list of models from the server at `url`. `adapters` replaces the adapters that it lists.

    Raises ConfigError if there is no valid response, or if llama.cpp's server does not have one of `adapters`.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for one that is no number
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: write it as http://host:port")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{prefix}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if backend == "llamacpp":
        ids = await _llamacpp_adapters(root, headers)
        base, known, ranks, most, listed = "base", tuple(ids), dict[str, int](), None, set(ids)
        dialect: Dialect = LlamaCpp(ids)
    else:
        base, known, ranks, most, listed = await _openai_models(root, headers)
        dialect = OpenAICompletions(base) if backend == "openai" else OpenAIChat(base)
    unlisted = tuple(sorted(set(adapters or ()) - listed))
    if unlisted and backend == "llamacpp":
        raise ConfigError(f"--lora-modules: {root} has no adapter {unlisted[0]!r}; it has {', '.join(known) or 'none'}")
    return Endpoint(
        root=root,
        tls=ssl.create_default_context() if parts.scheme == "https" else None,
        headers=headers,
        base_model=base,
        adapters=known if adapters is None else tuple(adapters),
        unlisted=unlisted,
        ranks=ranks,
        max_model_len=most,
        dialect=dialect,
    )


async def adapter_loads(endpoint: Endpoint) -> AdapterLoads:
    """Reads from the metrics of a CaraServe server how many adapters it has loaded. Raises OSError if it does not
    answer."""
    url = f"{endpoint.root}/metrics"
    try:
        async with (
            aiohttp.ClientSession(headers=endpoint.headers, raise_for_status=True) as session,
            session.get(url) as answer,
        ):
            samples = _LOADS.findall(await answer.text())
    except aiohttp.ClientError as error:
        raise OSError(f"{url}: {error}") from error
    counts = {"total": 0, "under_way": 0}
    for name, count in samples:
        counts[name] += int(float(count))
    return AdapterLoads(counts["total"], counts["under_way"])


async def _openai_models(
    root: str, headers: Mapping[str, str]
) -> tuple[str, tuple[str, ...], dict[str, int], int | None, set[str]]:
    """Returns the base model, the adapters (models with a parent), their ranks, the longest request, and all names."""
    content = await _get(f"{root}/v1/models", headers)
    cards = content.get("data") if isinstance(content, dict) else None
    if not isinstance(cards, list) or not cards:
        raise ConfigError(f"{root}/v1/models lists no models")
    adapters = tuple(card["id"] for card in cards if card.get("parent"))
    bases = [card["id"] for card in cards if not card.get("parent")]
    ranks = {card["id"]: card["rank"] for card in cards if isinstance(card.get("rank"), int)}
    lengths = [card["max_model_len"] for card in cards if isinstance(card.get("max_model_len"), int)]
    base = bases[0] if bases else cards[0]["parent"]
    return base, adapters, ranks, min(lengths, default=None), {card["id"] for card in cards}


async def _llamacpp_adapters(root: str, headers: Mapping[str, str]) -> dict[str, int]:
    """Returns the number of each adapter by the name of its file."""
    listed = await _get(f"{root}/lora-adapters", headers)
    if not isinstance(listed, list):
        raise ConfigError(f"{root}/lora-adapters is no list of adapters: is this llama.cpp's server?")
    return {str(entry["path"]).rsplit("/", 1)[-1].removesuffix(".gguf"): int(entry["id"]) for entry in listed}


async def _get(url: str, headers: Mapping[str, str]) -> Any:
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session, session.get(url) as answer:
            if answer.status != 200:
                raise ConfigError(f"{url} answers with HTTP {answer.status}")
            return await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(f"{url}: {str(error) or 'no answer'}") from None
    except ValueError:
        raise ConfigError(f"{url} answers with something that is not JSON") from None
