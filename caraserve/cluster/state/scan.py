"""All names of a cluster, looked at without holding up the event loop."""

from collections.abc import AsyncIterator

from caraserve.cluster.membership.node import Node
from caraserve.cluster.state.replicated_map import SHARED, Adapter
from caraserve.util.tasks import in_turns


async def known_adapters(node: Node) -> AsyncIterator[Adapter]:
    """What each name means when its turn comes. Names that are given meanwhile may be missing, and may be there."""
    facts = node.core.facts
    async for fact in in_turns(facts.shelf(SHARED) or ()):
        if (adapter := facts.adapter(fact.key)) is not None:
            yield adapter
