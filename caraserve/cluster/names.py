"""All names of a cluster, looked at without holding up the event loop. Level 4."""

import asyncio
from collections.abc import AsyncIterator

from caraserve.cluster.facts import SHARED, Adapter
from caraserve.cluster.node import Node


async def known_adapters(node: Node) -> AsyncIterator[Adapter]:
    """What each name means, a few at a time, with a turn of the event loop after each of them: names that come or go
    meanwhile may be missing, and may be there."""
    facts = node.core.facts
    shelf = facts.shelf(SHARED)
    for bucket in range(len(shelf.sums) if shelf is not None else 0):
        for name in [fact.key for fact in shelf.bucket(bucket)] if shelf is not None else []:
            if (adapter := facts.adapter(name)) is not None:
                yield adapter
        await asyncio.sleep(0)
