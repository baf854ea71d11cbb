"""Patterns over the names of modules match what `re` matches, in a time that no pattern can make long."""

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from caraserve.errors import ModelLoadError
from caraserve.model.name_patterns import NamePattern, PatternError
from caraserve.model.quantization import parse_quantization

NAMES = (
    *("model.layers.0.mlp.up_proj", "model.layers.12.self_attn.q_proj", "model.layers.1.mlp.experts.7.down_proj"),
    *("lm_head", "model.embed_tokens", "a", "aab", "ab\n", ""),
)


@pytest.mark.parametrize(
    "pattern",
    [
        *(".*lm_head", "model.layers.0", r".*\.(?:0|1|12)\.(mlp|self_attn)\..*_proj$", r"^(?!.*experts).*proj"),
        *(r"model[.]layers[.]\d+[.]mlp", r".*layers\.(\d|1[0-5])\..*", "(?=.*mlp).*up", r".*\bq_proj\Z", "", "^$"),
        *("a{2}b", "a{,1}b", "a{1,}?b", "(a|aa)+b", "a{0}b?", "(?:a|)b", "a|b|", "[]a]+", "[^.]*$", "x{", "a{}"),
        *("()*a", "a$", r"(((a+)+)+)+"),
    ],
)
def test_a_pattern_matches_what_re_matches(pattern: str) -> None:
    for name in NAMES:
        assert NamePattern(pattern).matches(name) == (re.match(pattern, name) is not None), name


REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "+?"]
_items = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", "$", r"\."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda both: f"(?:{both[0]}|{both[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "+?"])).map(
            lambda both: f"({both[0]}){both[1]}"
        ),
        inner.map(lambda one: f"(?={one})"),
        inner.map(lambda one: f"(?!{one})"),
    ),
    max_leaves=6,
)


@given(_items, st.text("ab.", max_size=6))
@example("(a|)*b", "aab")
def test_any_pattern_matches_what_re_matches(pattern: str, name: str) -> None:
    assert NamePattern(pattern).matches(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a)", r"has a \) too many"),
        ("(a", "has a group without an end"),
        ("*a", r"repeats nothing, or a repeat, with \*"),
        ("a*+", r"repeats nothing, or a repeat, with \+"),
        ("[a", r"has \[: unterminated character set"),
        (r"(a)\1", r"has \\1, which is not read"),
        ("(?P<n>a)", r"has \(\?P, which is not read; groups are"),
        ("(?<!a)b", r"has \(\?<!, which"),
        ("a{3000}", r"repeats \{3000\}; up to 2000"),
        ("(" * 40 + ")" * 40, "has groups in groups 21 deep; up to 20"),
        ("a" * 1001, "has 1001 characters; up to 1000"),
        ("(a{99}){99}", "has more than 2000 steps"),
        ("((){1999}){1999}", "has more than 2000 steps"),
    ],
)
def test_what_is_not_read_is_said(pattern: str, says: str) -> None:
    with pytest.raises(PatternError, match=f"^{says}"):
        NamePattern(pattern)


SLOW = ["(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*.*)*.*.*.*.*.*.*.*.*.*x", "(((a*)*)*)*$", "(a?){30}a{30}$", "(?=(a+)+$)x"]


@pytest.mark.parametrize("pattern", SLOW)
def test_a_name_cannot_be_made_to_take_long(pattern: str) -> None:
    """With backtracking each of these takes minutes or more."""
    slow, begun = NamePattern(pattern), time.process_time()
    assert not slow.matches("a" * 59 + "!")
    assert time.process_time() - begun < 0.1


def test_a_pattern_that_takes_long_is_refused_by_its_name() -> None:
    pattern = "(?=.*" * 15 + "(.*){400}x" + ")" * 15
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [f"re:{pattern}"]}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    section["config_groups"] = {"all": {"targets": ["Linear"], "weights": weights}}
    section["format"] = "int-quantized"
    found = parse_quantization({"quantization_config": section})
    assert found is not None
    says = r"^config\.json: quantization_config: 're:\(\?=.* takes more than 200000 steps for model\.layers"
    with pytest.raises(ModelLoadError, match=says):
        found.format_of(NAMES[0])
