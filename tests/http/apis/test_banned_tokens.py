"""The fields `allowed_token_ids` and `bad_words`: which tokens may follow, and what is refused."""

from typing import Any

import numpy as np
import pytest

from caraserve.core.grammar import mask_words
from tests.http.fake_engine import EOS, FakeEngine, FakeTokenizer
from tests.http.serving import Client, OneOff, serving, wrong

EVERY = set(range(FakeTokenizer.vocab_size))


async def allowed_after(output: bytes, **fields: Any) -> set[int]:
    """Returns the tokens that may follow after an answer began with `output`."""
    fake = FakeEngine()
    async with serving(fake) as client:
        for answer in (await client.complete(**fields), await client.chat(**fields)):
            assert answer.status == 200, answer.body
    masks = []
    for request in fake.requests:
        assert request.params.grammar is not None
        mask = np.zeros(mask_words(FakeTokenizer.vocab_size), np.uint32)
        request.params.grammar.matcher(list(output)).write_mask(mask)
        masks.append({one for one in range(32 * len(mask)) if mask[one // 32] >> np.uint32(one % 32) & 1})
    assert masks[0] == masks[1]
    return masks[0]


async def test_only_allowed_token_ids_may_follow() -> None:
    assert await allowed_after(b"a", allowed_token_ids=[3, EOS, 3]) == {3, EOS}


@pytest.mark.parametrize(
    ("output", "missing"), [(b"", b"z"), (b"se", b"az"), (b"the se", b"az"), (b" se", b"az"), (b"see", b"z")]
)
async def test_a_bad_word_may_not_be_completed(output: bytes, missing: bytes) -> None:
    assert await allowed_after(output, bad_words=["sea", " z"]) == EVERY - set(missing)


async def test_a_word_within_a_text_counts_where_a_space_makes_other_tokens_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(tokenizer: FakeTokenizer, text: str, **settings: Any) -> list[int]:
        """As byte-pair encodings do, writes a space and a letter as one token."""
        return [text[1].encode()[0] + 128, *text[2:].encode()] if text.startswith(" ") else list(text.encode())

    monkeypatch.setattr(FakeTokenizer, "encode", encode)
    fields: dict[str, Any] = {"prompt": [1], "bad_words": ["ab", "c"]}
    fake = FakeEngine()
    assert (await OneOff(fake).complete(**fields)).status == 200
    grammar = fake.requests[0].params.grammar
    assert grammar is not None
    for output, missing in (([], {99, 227}), ([97], {98, 99, 227}), ([225], {98, 99, 227})):
        mask = np.zeros(mask_words(FakeTokenizer.vocab_size), np.uint32)
        grammar.matcher(output).write_mask(mask)
        assert {one for one in EVERY if not mask[one // 32] >> np.uint32(one % 32) & 1} == missing


async def test_the_end_may_not_come_before_min_tokens() -> None:
    fields = {"allowed_token_ids": [65, EOS, 66], "min_tokens": 2, "stop_token_ids": [66]}
    assert await allowed_after(b"A", **fields) == {65}
    assert await allowed_after(b"AA", **fields) == {65, 66, EOS}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *wrong("allowed_token_ids", [], [258], ["a"]),
        *wrong("bad_words", "sea", [""], [" "], [3], ["x" * 257], ["x"] * 1025, ["x" * 200] * 41),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_wrong_values_are_refused(kind: str, fields: dict[str, Any], param: str, client: Client) -> None:
    answer = await getattr(client, kind)(**fields)
    assert (answer.status, answer.error["param"]) == (400, param)
