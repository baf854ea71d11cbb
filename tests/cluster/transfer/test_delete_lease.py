"""Delete leases: one instance keeps the bytes, even if messages are lost, repeated or late, and instances restart or
lose their disks."""

from collections.abc import Callable
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from caraserve.cluster.transfer.delete_lease import DeleteLeases

DIGEST = "sha256:1"
TTL_S = 10.0


class HoldersOfOneDigest(RuleBasedStateMachine):
    """Four instances that all try to delete one digest; queries and answers arrive late, twice or never."""

    @initialize(seed=st.integers(0, 9999), holders=st.integers(1, 15))
    def begin(self, seed: int, holders: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.copies = [DeleteLeases() for _ in range(4)]
        self.messages: list[Callable[[], None]] = []
        for index, copies in enumerate(self.copies):
            if holders >> index & 1:
                copies.verified(DIGEST)

    @rule(who=st.integers(0, 3), whom=st.integers(0, 3))
    def ask(self, who: int, whom: int) -> None:
        """Starts a delete request to any other instance: safety does not depend on the choice of the holder."""
        number = self.copies[who].start_delete(DIGEST, TTL_S, self.now) if who != whom else None
        if number is not None:
            self.messages.append(lambda: self._asked(who, whom, number))

    @rule(at=st.integers(0, 99), again=st.booleans())
    def deliver(self, at: int, again: bool) -> None:
        if self.messages:
            index = at % len(self.messages)
            message = self.messages[index] if again else self.messages.pop(index)
            message()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 9.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=st.integers(0, 3))
    def no_answer(self, who: int) -> None:
        self.copies[who].finish_delete(DIGEST, self.copies[who]._number, False, self.now)

    @rule(who=st.integers(0, 3))
    def fetch(self, who: int) -> None:
        if any(copies.has(DIGEST) for copies in self.copies):
            self.copies[who].verified(DIGEST)

    @rule(who=st.integers(0, 3))
    def restart(self, who: int) -> None:
        old, new = self.copies[who], DeleteLeases()
        held = {DIGEST} if old.has(DIGEST) else set()
        new.restore(held, TTL_S, self.now)
        new._number = old._number  # questions of an earlier run arrive nowhere: their connection ended with it
        self.copies[who] = new

    @rule(who=st.integers(0, 3))
    def crash(self, who: int) -> None:
        """Loses an instance's disk. The instance that has its promise may still delete, so a third one must hold it."""
        others = [copies for index, copies in enumerate(self.copies) if index != who]
        if any(copies.has(DIGEST) and DIGEST not in copies._asked for copies in others):
            self.copies[who].lost(DIGEST)

    @invariant()
    def an_instance_has_it(self) -> None:
        assert not hasattr(self, "copies") or any(copies.has(DIGEST) for copies in self.copies)

    def _asked(self, who: int, whom: int, number: int) -> None:
        kept = self.copies[whom].promise(DIGEST, TTL_S, self.now)
        self.messages.append(lambda: self._answered(who, number, kept))

    def _answered(self, who: int, number: int, kept: bool) -> None:
        self.copies[who].finish_delete(DIGEST, number, kept, self.now)


TestHoldersOfOneDigest = HoldersOfOneDigest.TestCase
TestHoldersOfOneDigest.settings = settings(max_examples=60, stateful_step_count=40)


def two_holders() -> tuple[DeleteLeases, DeleteLeases]:
    one, other = DeleteLeases(), DeleteLeases()
    one.verified(DIGEST)
    other.verified(DIGEST)
    return one, other


def test_one_of_two_holders_may_delete_and_the_other_then_keeps_its_copy() -> None:
    one, other = two_holders()
    number = one.start_delete(DIGEST, TTL_S, 0.0)
    assert number is not None
    assert other.promise(DIGEST, TTL_S, 0.1)
    assert one.finish_delete(DIGEST, number, True, 0.2)
    assert not one.has(DIGEST)
    assert other.start_delete(DIGEST, TTL_S, 5.0) is None
    assert other.start_delete(DIGEST, TTL_S, 10.2) is not None
    assert not one.promise(DIGEST, TTL_S, 10.3)


def test_two_holders_that_both_want_to_delete_refuse_each_other() -> None:
    one, other = two_holders()
    assert one.start_delete(DIGEST, TTL_S, 0.0) is not None
    assert other.start_delete(DIGEST, TTL_S, 0.0) is not None
    assert not one.promise(DIGEST, TTL_S, 0.1)
    assert not other.promise(DIGEST, TTL_S, 0.1)


def test_a_promise_that_came_too_late_is_ignored() -> None:
    one, _ = two_holders()
    number = one.start_delete(DIGEST, TTL_S, 0.0)
    assert number is not None
    assert not one.finish_delete(DIGEST, number, True, 9.0)
    assert one.has(DIGEST)


def test_after_a_restart_a_copy_is_kept_as_long_as_any_promise_may_last() -> None:
    new = DeleteLeases()
    new.restore({DIGEST}, TTL_S, 100.0)
    assert new.start_delete(DIGEST, TTL_S, 109.0) is None
    assert new.start_delete(DIGEST, TTL_S, 110.1) is not None


def test_an_answer_to_an_earlier_request_is_ignored() -> None:
    one, other = two_holders()
    first = one.start_delete(DIGEST, TTL_S, 0.0)
    assert first is not None
    assert other.promise(DIGEST, TTL_S, 0.1)
    second = one.start_delete(DIGEST, TTL_S, 20.0)
    assert second is not None
    assert not one.finish_delete(DIGEST, first, True, 20.1)  # that promise has run out
    assert one.has(DIGEST)
    assert one.finish_delete(DIGEST, second, True, 20.2)
