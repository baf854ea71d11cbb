"""Expected times of copies: corrected by those that have arrived, and while one is late."""

from caraserve.config import LOADING_MODES
from caraserve.core.lora_layout import AdapterSpec
from caraserve.lora.adapter import Adapter, AdapterTier, RemoteSource
from caraserve.lora.arrival_estimates import ArrivalEstimates
from caraserve.lora.start_policy import AwaitedPrefill, StartPolicy
from caraserve.model.dtype import Dtype
from tests.lora.test_start_policy import Costs

LINK = 1000.0  # bytes/s
SPEC = AdapterSpec("digest", Dtype.F32, 8, ("q_proj",), (500, 1000), spans=())  # a second on the link
LAYER_S = 1 / 1024


class Copies:
    """Adapters of which copies are under way, at a time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loading = StartPolicy(LOADING_MODES["pipelined"], 2, LINK, Costs(1000 * LAYER_S, 2))  # type: ignore[arg-type]
        self.estimates = ArrivalEstimates(loading, lambda: self.now_s)

    def begin(self) -> Adapter:
        adapter = Adapter("digest", RemoteSource("digest"), 1000)
        adapter.move_to(AdapterTier.HOST)
        adapter.move_to(AdapterTier.COPYING)
        adapter.spec = SPEC
        adapter.groups = self.estimates.expect(SPEC, AwaitedPrefill(8, self.now_s)).groups
        return adapter

    def start_s(self, adapter: Adapter) -> float:
        start = self.estimates.start_of(adapter, AwaitedPrefill(8, self.now_s), may_assist=False)
        assert start is not None
        return start.at_s


def test_copies_that_follow_one_are_as_late_as_it_was() -> None:
    copies = Copies()
    first, second = copies.begin(), copies.begin()
    before_s = copies.start_s(second)
    copies.now_s = 1.25  # instead of 1.0
    copies.estimates.arrived(first, [second])
    assert copies.start_s(second) == before_s + 0.25
    assert max(group.arrives_s for group in copies.begin().groups) == 3.25
    copies.now_s = 2.0  # 0.25 s earlier than expected by now
    copies.estimates.arrived(second, [])
    assert max(group.arrives_s for group in copies.begin().groups) == 4.0


def test_a_late_copy_may_be_late_for_as_long_again() -> None:
    """Otherwise a prefill would start, and all requests of its iteration would wait for the copy."""
    copies = Copies()
    adapter = copies.begin()
    copies.now_s = 1.0
    assert copies.start_s(adapter) == 1.0
    copies.now_s = 1.5
    assert copies.start_s(adapter) == 2.0 - LAYER_S  # its last layer is reached then
