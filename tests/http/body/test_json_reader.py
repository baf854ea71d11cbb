"""Bodies as JSON objects: the same values and the same refusals whether they are read at once or piece by piece."""

import asyncio
import json
import time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.errors import InvalidRequest
from caraserve.http.body import json_reader
from caraserve.http.body.json_reader import parse_object

_TEXTS = ["", "a", "日本", "😀", 'quote " backslash \\ line \n', "x" * 40_000, "é\\" * 20_000]
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(-1e9, 1e9) | st.sampled_from(_TEXTS),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=30,
)
# Larger than what is parsed at once, without a meaning.
PADDING = b'{"padding":"%b",' % (b"x" * 20_000)


def large(rest: bytes) -> bytes:
    return PADDING + rest


async def both(fields: bytes) -> list[Any]:
    """Parses a small and a large object with these fields; returns values, or the first words of refusals."""
    results: list[Any] = []
    for body in (b'{"padding":0,' + fields, large(fields)):
        try:
            results.append((await parse_object(body)) | {"padding": 0})
        except InvalidRequest as error:
            results.append(error.message.partition(":")[0])
    return results


@settings(max_examples=60)
@given(_VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_a_large_body_has_the_values_that_it_was_written_from(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps({"filler": "x" * 20_000, "value": value}, ensure_ascii=ascii_only, indent=indent).encode()
    assert asyncio.run(parse_object(body)) == orjson.loads(body)


@settings(max_examples=150)
@given(_VALUES, st.integers(0), st.binary(max_size=2))
def test_a_damaged_body_gives_the_same_values_or_is_refused_both_whole_and_piece_by_piece(
    value: Any, position: int, damage: bytes
) -> None:
    fields = b'"value":' + json.dumps(value).encode() + b"}"
    at = position % len(fields)
    small, big = asyncio.run(both(fields[:at] + damage + fields[at + 1 :]))
    # A body with two faults may be refused for either.
    assert small == big or (isinstance(small, str) and isinstance(big, str))


@pytest.mark.parametrize(
    "rest",
    [
        b'"a":1}',
        b'"a":[1,2.5,-3e2,true,false,null,"b",{},[]]}',
        b' "a" : [ 1 , 2 ] \n}\n',
        b'"a":"\\ud83d\\ude00 \\\\ud83d \\u0000"}',
        b'"a":1,"a":2}',
        b'"a":{"b":1,"b":2}}',
        b'"a":[1,]}',
        b'"a":[,1]}',
        b'"a":["b",]}',
        b'"a":["b" "c"]}',
        b'"a":[1 2]}',
        b'"a":[1}',
        b'"a":{]}',
        b'"a":1,}',
        b'"a" 1}',
        b"a:1}",
        b'"a":01}',
        b'"a":NaN}',
        b'"a":1e999}',
        b'"a":"\\ud83d"}',
        b'"a":"\\x"}',
        b'"a":"\x01"}',
        b'"a":"\xff"}',
        b'"a":"b',
        b'"a":1',
        b'"a":1}}',
        b'"a":1} 2',
        b'"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
async def test_acceptance_of_a_body_does_not_depend_on_its_size(rest: bytes) -> None:
    small, big = await both(rest)
    # A body with two faults may be refused for either.
    assert small == big or (isinstance(small, str) and isinstance(big, str))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a":[' + b"1," * 600_000 + b"1]}", "524288 numbers in lists"),
        (b'{"a":[' + b"[]," * 70_000 + b"[]]}", "65536 values"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(70_000)) + b"}", "65536 values"),
        (b'{"a":"' + b"x" * 5_000_000 + b'"}', "4194304 characters"),
    ],
)
async def test_values_that_take_long_to_free_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await parse_object(body)


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ('{"k": 1, "k": 1}', True),
        ('{"text": "a: b", "inner": {"k": 1, "k": 2}}', True),
        ('{"list": [{"a": 1}, {"k": [], "k": []}]}', True),
        ('{"list": [1, {"k": 1, "k": 2}]}', True),
        ('{"k": {"a": 1, "b": 2}, "k": {}}', True),
        ('{"k": 1, "\\u006b": 2}', True),
        ('{"text": "k: 1, k: 2", "k": {"k": {"k": [[{"k": 0}], {"k": 1}]}}}', False),
    ],
)
async def test_equal_keys_of_one_object_are_refused_at_any_depth(body: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(InvalidRequest, match="'k' twice in one object"):
            await parse_object(body.encode())
    else:
        assert await parse_object(body.encode()) == json.loads(body)


async def test_equal_keys_are_found_in_time_that_grows_with_their_number() -> None:
    body = b"{" + b",".join(b'"%d":1' % number for number in range(1_800)) + b',"1799":2}'
    assert len(body) <= json_reader._AT_ONCE_BYTES
    took_s = []
    for _ in range(5):
        began_s = time.thread_time()
        with pytest.raises(InvalidRequest, match="'1799' twice"):
            await parse_object(body)
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.005


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"' + b"x" * 4_000_000 + b'"}',
        b'{"a":"' + b"\\n" * 2_000_000 + b'"}',
        b'{"a":[' + b"10000," * 400_000 + b"1]}",
        b'{"a":[' + b'{"type":"text"},' * 20_000 + b"1]}",
        b'{"a":1' + b" " * 10_000_000 + b"}",
    ],
    ids=["text", "escapes", "ids", "objects", "blanks"],
)
def test_each_piece_is_parsed_in_a_short_time(body: bytes) -> None:
    def longest_ms() -> float:
        reader, longest, began_s = json_reader._Reader(body, json_reader.MOST_NUMBERS, "It"), 0.0, time.thread_time()
        try:
            for _ in reader.read():
                now_s = time.thread_time()
                longest, began_s = max(longest, now_s - began_s), now_s
        except InvalidRequest:
            pass
        return 1000 * longest

    assert min(longest_ms() for _ in range(3)) < 10
