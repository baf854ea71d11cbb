"""Combinations of adapters, as `sql*0.7+legal*0.3`: each is an adapter of its own to the engine and its caches.

A combination is known by its canonical name alone, so every instance of a cluster that has its members can serve it. It
is made when a request names it, and forgotten when one of its members stands for other contents.
"""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from caraserve.core.adapter_facts import AdapterFacts
from caraserve.core.combined_names import combined_name, members_of
from caraserve.core.lora_layout import MAX_RANK, HostAdapter, aligned_bytes
from caraserve.errors import AdapterBusy, AdapterRejected, CaraServeError
from caraserve.lora.adapter import CombinedSource, Done, LayersArrived, files_changed
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.combined_image import WeightedImage, rank_refusal, write_combination
from caraserve.lora.manager import AdapterManager
from caraserve.lora.registry import UPLOADING, AdapterInfo
from caraserve.model.plan import DecoderPlan

_MOST_KEPT = 256  # combinations without requests that are remembered
_RETRY_S = 1.0
_WIDENING = 2  # an image in fp32 is at most so many times as large as its members', which may have 16 bits

Member = tuple[AdapterInfo, float]


def combination_of(members: Sequence[Member]) -> AdapterInfo:
    """Returns the description of a combination. Raises AdapterRejected or AdapterBusy for one that cannot be served.
    `members`: each once, in the order of names."""
    for info, _ in members:
        if info.state == UPLOADING or not info.digest:
            raise _busy(f"{info.name} is being uploaded; combine it when it is complete")
        if info.facts.num_classes:
            raise AdapterRejected(f"{info.name} has a score head, so it cannot be combined or scaled", param="model")
    if (rank := sum(info.rank for info, _ in members)) > MAX_RANK:
        raise rank_refusal([(info.name, info.rank) for info, _ in members], rank)
    identity = json.dumps(["combination", [(info.digest, weight) for info, weight in members]])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    name = combined_name((info.name, weight) for info, weight in members)
    num_bytes = _WIDENING * sum(info.num_bytes for info, _ in members)
    facts = AdapterFacts(trained_on=members[0][0].facts.trained_on)
    return AdapterInfo(name, digest, digest, rank, (), num_bytes, time.time(), facts=facts)


def _busy(message: str) -> AdapterBusy:
    return AdapterBusy(message, retry_after_s=_RETRY_S, param="model")


class Combinations:
    """The combinations that requests have named. Runs on the event loop."""

    def __init__(
        self,
        plan: DecoderPlan,
        manager: AdapterManager,
        reader: AdapterReader,
        find: Callable[[str], AdapterInfo | None],
        refuse: Callable[[AdapterInfo], None],
    ) -> None:
        """`find`: returns the adapter of a name, not a combination. `refuse`: raises CaraServeError for one that can
        never be served."""
        self._plan, self._manager, self._reader = plan, manager, reader
        self._find, self._refuse = find, refuse
        self._kept: OrderedDict[str, tuple[AdapterInfo, tuple[Member, ...]]] = OrderedDict()  # the oldest use first

    def find(self, name: str) -> AdapterInfo | None:
        """Returns the combination of a canonical name; None if it is none, if a member is not here, or if it cannot be
        served."""
        if (kept := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return kept[0]
        found = [(self._find(member), weight) for member, weight in members_of(name)]
        members = tuple((info, weight) for info, weight in found if info is not None)
        if not members or len(members) < len(found):
            return None
        try:
            info = combination_of(members)
            self._refuse(info)
        except CaraServeError:
            return None
        source = Combination(self._plan, self._manager, self._reader, info.digest, members)
        self._manager.register(name, info.digest, source, info.num_bytes)
        self._kept[name] = info, members
        self._forget_oldest()
        return info

    def _forget_oldest(self) -> None:
        for name, (info, _) in list(self._kept.items())[: max(0, len(self._kept) - _MOST_KEPT)]:
            adapter = self._manager.find(info.digest)
            if adapter is None or adapter.pins == 0:
                self._forget(name)

    def member_changed(self, name: str) -> None:
        """Forgets the combinations of an adapter's name, unless it stands for the contents that they were made of."""
        now = self._find(name)
        for combined, (_, members) in list(self._kept.items()):
            if any(info.name == name and (now is None or now.digest != info.digest) for info, _ in members):
                self._forget(combined)

    def _forget(self, name: str) -> None:
        del self._kept[name]
        self._manager.unregister(name)


@dataclass(frozen=True, slots=True)
class Combination(CombinedSource):
    """The source of a combination: its members' images, from the host cache or from where they are."""

    plan: DecoderPlan
    manager: AdapterManager
    reader: AdapterReader
    digest: str
    members: tuple[Member, ...]

    def read(self, into: NDArray[np.uint8], done: Done, layers_arrived: LayersArrived) -> None:
        adapters = [adapter for info, _ in self.members if (adapter := self.manager.find(info.digest)) is not None]
        if len(adapters) < len(self.members):
            why = "an adapter of the combination was replaced or unloaded while the request waited; send it again"
            self.reader.refuse(_busy(why), done)
            return
        for adapter in adapters:
            self.manager.pin_again(adapter)
            self.manager.pin_image(adapter)
        results: dict[int, HostAdapter | CaraServeError] = {}

        def read_member(index: int, result: HostAdapter | CaraServeError) -> None:
            if isinstance(result, HostAdapter) and result.spec.digest != self.members[index][0].digest:
                result = files_changed()
            results[index] = result
            if len(results) == len(adapters):
                self.reader.executor.submit(combine)

        def combine() -> None:
            outcome = self._combined([results[index] for index in range(len(adapters))], into)
            self.reader.on_loop(lambda: end(outcome))

        def end(outcome: HostAdapter | CaraServeError) -> None:
            for adapter in adapters:
                self.manager.unpin_image(adapter)
                self.manager.unpin(adapter)
            done(outcome)

        for index, adapter in enumerate(adapters):
            if (image := self.manager.image(adapter.digest)) is not None:
                read_member(index, image)
            else:
                self.reader.read(adapter.source, aligned_bytes(adapter.num_bytes), partial(read_member, index))

    def _combined(
        self, results: Sequence[HostAdapter | CaraServeError], into: NDArray[np.uint8]
    ) -> HostAdapter | CaraServeError:
        images = []
        for (info, weight), result in zip(self.members, results, strict=True):
            if not isinstance(result, HostAdapter):
                return result
            images.append(WeightedImage(info.name, weight, result))
        try:
            return write_combination(self.plan, self.digest, images, into)
        except CaraServeError as error:
            return error
