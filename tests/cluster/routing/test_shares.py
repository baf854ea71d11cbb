"""Shares in arrays are the mapping they were made from, and a part of them is the same part of that mapping."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from caraserve.cluster.routing.placement_plan import Share, Shares

INSTANCES = ["s0", "s1", "s2", "s3"]
ADAPTERS = ["a", "b", "c", "d"]
OF_ONE = st.lists(st.builds(Share, st.sampled_from(INSTANCES), st.sampled_from([0.25, 0.5, 1.0])), max_size=3)
MAPPINGS = st.dictionaries(st.sampled_from(ADAPTERS), OF_ONE.map(tuple))
NAMES = st.lists(st.sampled_from([*ADAPTERS, *INSTANCES, "other"]), unique=True).map(sorted)

Plain = Mapping[str, Sequence[Share]]


@given(MAPPINGS)
def test_shares_are_the_mapping_they_were_made_from(plain: Plain) -> None:
    shares = Shares.of(plain)
    assert dict(shares) == plain
    assert [*shares] == sorted(plain)
    assert {name: shares.names(name) for name in ADAPTERS} == {
        name: tuple(share.instance for share in plain.get(name, ())) for name in ADAPTERS
    }
    for instance in INSTANCES:
        here = [name for name in sorted(plain) if instance in shares.names(name)]
        assert shares.adapters_on(instance) == here


@given(MAPPINGS, NAMES, NAMES)
def test_the_part_for_some_adapters_and_instances_has_what_the_whole_has_there(
    plain: Plain, adapters: list[str], instances: list[str]
) -> None:
    part = Shares.of(plain).among(adapters, instances)
    assert (part.adapters, part.instances) == (adapters, instances)
    assert dict(part) == {
        name: tuple(share for share in plain.get(name, ()) if share.instance in instances) for name in adapters
    }


@given(MAPPINGS, MAPPINGS)
def test_equal_mappings_have_equal_shares_and_digests(plain: Plain, other: Plain) -> None:
    first, second = Shares.of(plain), Shares.of(other)
    assert (first == second) == (plain == other) == (first.digest({}) == second.digest({}))
    first, second = (each.among(ADAPTERS, INSTANCES) for each in (first, second))
    equal = [plain.get(name, ()) == other.get(name, ()) for name in ADAPTERS]
    assert first.equal_rows(second).tolist() == equal
    assert (first == second) == all(equal)


@given(MAPPINGS)
def test_the_digest_depends_on_no_instance_without_adapters(plain: Plain) -> None:
    shares = Shares.of(plain)
    assert shares.digest({}) == shares.among([*shares], INSTANCES).digest({})
    assert shares.digest({}) != shares.digest({"s0": 8})
