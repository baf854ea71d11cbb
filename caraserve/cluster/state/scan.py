"""All names of a cluster, looked at without holding up the event loop."""

from collections.abc import AsyncIterator

from caraserve.cluster.membership.node import Node
from caraserve.cluster.state.replicated_map import REGISTRY, RegisteredAdapter
from caraserve.util.tasks import in_turns


async def known_adapters(node: Node) -> AsyncIterator[RegisteredAdapter]:
    """What each name means when its turn comes. Names that are given meanwhile may be missing, and may be there."""
    entries = node.protocol.state
    async for entry in in_turns(entries.map_of(REGISTRY) or ()):
        if (adapter := entries.adapter(entry.key)) is not None:
            yield adapter
