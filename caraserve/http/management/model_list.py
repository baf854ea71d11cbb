"""GET /v1/models and GET /v1/models/NAME: the models that a client may use.

Routers poll it, and 40,000 adapters take half a second to encode. So each adapter's card is encoded once, in turns of
the event loop, and a client's list is put together from cards: where a pattern begins with fixed characters, only the
names that begin with them are compared.
"""

import asyncio
import re
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import orjson
from aiohttp import web

from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.http.access.adapter_choice import (
    find_adapter,
    find_named,
    remote_adapter,
    target_of,
    unknown_model,
)
from caraserve.http.client import ALL_ADAPTERS, CLIENT, Client, name_pattern
from caraserve.http.context import CONTEXT, Context
from caraserve.http.management.status import sorted_by_name
from caraserve.http.responses import json_response
from caraserve.lora.registry import AdapterInfo
from caraserve.util.tasks import in_turns, slices

_MOST_BYTES = 64 << 20  # of lists kept, the most recently used; a list of 20,000 adapters has 4 MB
_SLICE = 100  # names compared, or adapters looked up, between two looks at the clock
_SORTED_AT_ONCE = 2000  # names, in 1 ms
_WILDCARD = re.compile(r"[*?\[]")
_LAST_CHARACTER = chr(0x10FFFF)  # sorts behind all that may follow a prefix


@dataclass(frozen=True, slots=True)
class _Cards:
    """All cards in the order of the list, and the names by which a client may use them."""

    base: list[bytes]  # of the base model, one for each of its names
    cards: list[bytes]
    names: list[str]  # sorted
    places: dict[str, list[int]]  # of a name's cards in `cards`: its own, and those of the aliases for it

    async def chosen(self, client: Client) -> bytes:
        """Returns the list of what a client may use."""
        cards: Iterator[bytes] | list[bytes] = self.cards
        if ALL_ADAPTERS[0] not in client.adapters:
            marks = bytearray(len(self.cards))
            async for names in in_turns(self._matching(client.adapters)):
                for name in names:
                    for place in self.places[name]:
                        marks[place] = 1
            cards = compress(self.cards, marks)
        base = self.base if client.base_model else ()
        return b'{"object":"list","data":[%b]}' % b",".join((*base, *cards))

    def _matching(self, patterns: Sequence[str]) -> Iterator[list[str]]:
        """Yields the names that match, some at a time."""
        for pattern in patterns:
            fixed = _WILDCARD.split(pattern, maxsplit=1)[0]
            if fixed == pattern:
                yield [pattern] if pattern in self.places else []
                continue
            matches = name_pattern((pattern,)).fullmatch
            first = bisect_left(self.names, fixed)
            end = bisect_left(self.names, fixed + _LAST_CHARACTER)
            for at in range(first, end, _SLICE):
                yield [name for name in self.names[at : min(end, at + _SLICE)] if matches(name)]


_Source = AdapterInfo | RegisteredAdapter


class ModelList:
    """The cards of all models: for admins with the paths of adapters' folders, for others without."""

    def __init__(self) -> None:
        self._lists = {shows_paths: _CardList(shows_paths) for shows_paths in (False, True)}

    async def body(self, context: Context, client: Client) -> bytes:
        """Returns the response's body."""
        return await self._lists[client.is_admin].body(context, client)


class _CardList:
    """The cards of all models, and the newest lists by what a client may use."""

    def __init__(self, shows_paths: bool) -> None:
        self._shows_paths = shows_paths
        self._adapters: list[AdapterInfo] = []
        self._versions = 0, 0  # of the cluster's registry, and of the aliases
        self._encoded: dict[str, tuple[_Source, bytes]] = {}  # cards by name, each with what it was made of
        self._cards: _Cards | None = None
        self._bodies: dict[tuple[tuple[str, ...], bool], bytes] = {}  # the least recently used first
        self._num_bytes = 0  # of the bodies
        self._updating = asyncio.Lock()

    async def body(self, context: Context, client: Client) -> bytes:
        """Returns the response's body."""
        cards = await self._updated(context)
        allowed = client.adapters, client.base_model
        body = self._bodies.pop(allowed, None)
        if body is None:
            body = await cards.chosen(client)
            if cards is not self._cards or allowed in self._bodies:
                return body
            self._num_bytes += len(body)
        self._bodies[allowed] = body
        while self._num_bytes > _MOST_BYTES and len(self._bodies) > 1:
            self._num_bytes -= len(self._bodies.pop(next(iter(self._bodies))))
        return body

    async def _updated(self, context: Context) -> _Cards:
        """Returns the cards of the adapters and aliases that there are now."""
        async with self._updating:
            adapters = context.engine.adapters()
            registry_version = context.cluster.registry_version if context.cluster else 0
            versions = registry_version, context.management.aliases.version if context.management else 0
            if self._cards is None or adapters != self._adapters or versions != self._versions:
                cards = await self._encode(context, adapters)
                self._adapters, self._versions, self._cards = adapters, versions, cards
                self._bodies, self._num_bytes = {}, 0
            return self._cards

    async def _encode(self, context: Context, adapters: Sequence[AdapterInfo]) -> _Cards:
        """Encodes the base model by all its names, this instance's adapters, those that only other instances have, by
        name, then the aliases."""
        encoded: dict[str, tuple[_Source, bytes]] = {}
        cards: list[bytes] = []
        places: dict[str, list[int]] = {}
        async for some in _sources(context, adapters):
            for one in some:
                if one.name in encoded:  # this instance has it too
                    continue
                known = self._encoded.get(one.name)
                if known is None or not (known[0] is one or known[0] == one):
                    listed = remote_adapter(context, one) if isinstance(one, RegisteredAdapter) else one
                    known = one, orjson.dumps(adapter_card(context, listed, shows_path=self._shows_paths))
                encoded[one.name], places[one.name] = known, [len(cards)]
                cards.append(known[1])
        self._encoded = encoded
        async for alias in in_turns(context.management.aliases.all() if context.management else ()):
            if (target := find_named(context, target_of(context, alias.name))) is not None:
                for name in (alias.name, target.name):
                    places.setdefault(name, []).append(len(cards))
                card = adapter_card(context, target, shows_path=self._shows_paths)
                cards.append(orjson.dumps(card | {"id": alias.name}))
        base = [orjson.dumps(base_card(context, name)) for name in context.engine.base_names]
        return _Cards(base, cards, await _sorted(places), places)


async def _sources(context: Context, adapters: Sequence[AdapterInfo]) -> AsyncIterator[Sequence[_Source]]:
    """Yields this instance's adapters, then the cluster's by name, some at a time, in turns of the event loop."""
    async for some in in_turns(slices(adapters, _SLICE)):
        yield some
    if context.cluster is not None:
        async for others in sorted_by_name(context.cluster.adapters()):
            yield others


async def _sorted(names: dict[str, list[int]]) -> list[str]:
    """Sorts names in turns of the event loop: sorting slices that are sorted already takes a fifth of the time."""
    found: list[str] = []
    async for some in in_turns(slices(names, _SORTED_AT_ONCE)):
        found += sorted(some)
    await asyncio.sleep(0)
    found.sort()
    await asyncio.sleep(0)
    return found


def base_card(context: Context, name: str) -> dict[str, Any]:
    """vLLM's model card of the base model, with the formats of its weights and what a GGUF file says about itself."""
    base = context.engine.catalog.rules.base
    own = {"weights": base.formats, "gguf": dict(base.card)}
    return _card(context, name) | {key: value for key, value in own.items() if value}


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_s),
        "owned_by": "caraserve",
        "root": context.engine.base_name,
        "parent": None,
        "rank": None,
        "max_model_len": context.engine.max_model_len,
        "permission": [],
    }


def adapter_card(context: Context, adapter: AdapterInfo, *, shows_path: bool) -> dict[str, Any]:
    """vLLM's model card with an adapter's rank; `root` is where the weights are from, or the adapter's name for a
    client that does not learn paths of this machine; `parent` is its base model."""
    return _card(context, adapter.name) | {
        "created": int(adapter.created_s),
        "root": adapter.path if shows_path else adapter.name,
        "parent": context.engine.base_name,
        "rank": adapter.rank,
        **facts_card(context, adapter),
    }


def facts_card(context: Context, adapter: AdapterInfo) -> dict[str, Any]:
    """What an adapter's files say: the base model that it was trained on, null if they do not say it, and whether it is
    another one; how many tokens they add; whether they have a chat template of their own; and how many classes their
    score head tells apart, 0 without one."""
    facts = adapter.facts
    return {
        "trained_on": facts.trained_on or None,
        "other_base": context.engine.catalog.rules.base.is_other(facts),
        "added_tokens": facts.added_tokens,
        "own_chat_template": bool(facts.template_digest),
        "num_classes": facts.num_classes,
    }


MODELS = web.AppKey("MODELS", ModelList)


async def list_models(request: web.Request) -> web.Response:
    """Lists the base model and its adapters."""
    body = await request.app[MODELS].body(request.app[CONTEXT], request[CLIENT])
    return web.Response(body=body, content_type="application/json")


async def show_model(request: web.Request) -> web.Response:
    """Shows one model."""
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    adapter = find_adapter(request, name)
    if adapter is None and not request[CLIENT].may_use(None):
        raise unknown_model(name)
    if adapter is None:
        return json_response(base_card(context, name))
    is_alias = target_of(context, name) != name
    card = adapter_card(context, adapter, shows_path=request[CLIENT].is_admin)
    return json_response(card | ({"id": name} if is_alias else {}))
