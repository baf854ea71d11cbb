"""Iteration over the registry that leaves the event loop responsive."""

from collections.abc import AsyncIterator

from caraserve.cluster.membership.node import Node
from caraserve.cluster.state.replicated_map import REGISTRY, RegisteredAdapter
from caraserve.util.tasks import in_turns


async def known_adapters(node: Node) -> AsyncIterator[RegisteredAdapter]:
    """Yields the adapter of each name, as it is when its turn comes. Names registered meanwhile may be missing."""
    entries = node.protocol.state
    async for entry in in_turns(entries.map_of(REGISTRY) or ()):
        if (adapter := entries.adapter(entry.key)) is not None:
            yield adapter
