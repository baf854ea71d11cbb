"""Text as it comes: whole characters, the same in the end as decoding at once, and no beginning of a stop string."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from caraserve.tokenizer.detokenizer import Detokenizer
from caraserve.tokenizer.token_texts import TokenTexts

_CORPUS = ["the cat sat on the mat", "naïve café ☕", "hello there, general"] * 3


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """Spaces as ▁, unknown characters as bytes, one leading space stripped: as Llama 2 and Mistral decode."""
    words = sorted({char for text in _CORPUS for char in text if ord(char) < 128} | {"▁", "th", "the", "▁the", "cat"})
    vocab = {token: index for index, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte-level": _byte_level(), "sentencepiece": _sentencepiece()}
for _tokenizer in TOKENIZERS.values():
    _tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
# Skipped when decoding, or unknown to the tokenizer as the ids that pad a model's vocabulary are.
SILENT_IDS = {
    kind: [tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>"), tokenizer.get_vocab_size() + 3]
    for kind, tokenizer in TOKENIZERS.items()
}


def detokenizer(kind: str, prompt: list[int], stop: tuple[str, ...] = (), *, include_stop: bool = False) -> Detokenizer:
    texts = TokenTexts(TOKENIZERS[kind])
    return Detokenizer(TOKENIZERS[kind].decode, prompt, stop=stop, include_stop=include_stop, text_of_token=texts)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(alphabet="the cat☕é日本🙂 ,x\n", min_size=1, max_size=40), cut=st.integers(0, 40))
def test_the_emitted_parts_join_to_the_whole_text(kind: str, text: str, cut: int) -> None:
    """For any text and any border between prompt and output: what comes is what decoding all of it adds."""
    ids = TOKENIZERS[kind].encode(text).ids
    prompt, output = ids[: min(cut, len(ids) - 1)], ids[min(cut, len(ids) - 1) :]
    subject = detokenizer(kind, prompt)
    parts = [subject.push(token)[0] for token in output]
    whole = TOKENIZERS[kind].decode(ids)
    before = TOKENIZERS[kind].decode(prompt)
    if not before.endswith("\ufffd"):  # a border inside a character has no right answer
        assert "".join(parts) + subject.flush() == whole[len(before) :]
        assert "\ufffd" not in "".join(parts)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=50)
@given(data=st.data())
def test_tokens_without_text_do_not_change_later_text(kind: str, data: st.DataObject) -> None:
    """A sampled special or unknown token must not cost the next word its space."""
    words = TOKENIZERS[kind].encode("the cat the x").ids
    ids = data.draw(st.lists(st.sampled_from(words) | st.sampled_from(SILENT_IDS[kind]), min_size=1, max_size=14))
    cut = data.draw(st.integers(0, len(ids) - 1))
    subject = detokenizer(kind, ids[:cut])
    text = "".join(subject.push(token)[0] for token in ids[cut:]) + subject.flush()
    assert text == TOKENIZERS[kind].decode(ids)[len(TOKENIZERS[kind].decode(ids[:cut])) :]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_newline_of_a_long_run_is_emitted_at_once(kind: str) -> None:
    """Newlines are byte tokens in some vocabularies: a context that begins inside the 🙂 before them garbles them."""
    tokenizer = TOKENIZERS[kind]
    prompt = tokenizer.encode("x🙂").ids
    newlines = tokenizer.encode("x🙂" + 30 * "\n").ids[len(prompt) :]
    subject = detokenizer(kind, prompt)
    assert [subject.push(token)[0] for token in newlines] == ["\n"] * 30


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_work_for_a_token_does_not_grow_with_the_text(kind: str) -> None:
    """Text, bytes and tokens without text alike, at the beginning and later."""
    decoded = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return str(TOKENIZERS[kind].decode(list(ids)))

    words = TOKENIZERS[kind].encode("the ☕\n").ids
    subject = Detokenizer(decode, [])
    for token in [SILENT_IDS[kind][0]] * 500 + words * 100 + [SILENT_IDS[kind][0]] * 500:
        subject.push(token)
    assert max(decoded) <= 40


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_invalid_bytes_are_emitted_at_the_end(kind: str) -> None:
    """A model may never complete a character; the text must not be held back without end."""
    broken = TOKENIZERS[kind].encode("☕").ids[-1]
    subject = detokenizer(kind, TOKENIZERS[kind].encode("the").ids)
    text = "".join(subject.push(broken)[0] for _ in range(40)) + subject.flush()
    assert text.count("\ufffd") >= 1


def test_a_byte_after_invalid_ones_is_what_decoding_all_of_them_gives() -> None:
    """A decoder joins bytes that follow each other: a letter's byte among invalid ones is no letter."""
    subject, tokenizer = detokenizer("sentencepiece", []), TOKENIZERS["sentencepiece"]
    broken, letter = (tokenizer.token_to_id(token) for token in ("<0xFF>", "<0x41>"))
    ids = [tokenizer.token_to_id("cat"), *[broken] * 16, letter]
    assert "".join(subject.push(token)[0] for token in ids) + subject.flush() == tokenizer.decode(ids)


def _push_text(subject: Detokenizer, text: str) -> tuple[list[str], str | None]:
    """Pushes characters one token each (byte-level, so that stop strings cross token borders)."""
    parts = []
    for char in text:
        for token in TOKENIZERS["byte-level"].encode(char).ids:
            part, hit = subject.push(token)
            parts.append(part)
            if hit is not None:
                return parts, hit
    return parts, None


@pytest.mark.parametrize(("include", "shown"), [(False, "the "), (True, "the END")])
def test_a_stop_string_across_tokens_is_found_and_cut(include: bool, shown: str) -> None:
    subject = detokenizer("byte-level", [], ("END",), include_stop=include)
    parts, hit = _push_text(subject, "the END of it")
    assert ("".join(parts), hit) == (shown, "END")
    assert subject.flush() == ""
    assert subject.push(5) == ("", None)


def test_a_possible_stop_string_is_held_back_until_it_cannot_match() -> None:
    subject = detokenizer("byte-level", [], ("\n\nQ:",))
    parts, hit = _push_text(subject, "a\n\n")
    assert ("".join(parts), hit) == ("a", None)
    more, _ = _push_text(subject, "b")
    assert "".join(more) == "\n\nb"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    parts, hit = _push_text(detokenizer("byte-level", [], ("later", "at")), "cat later")
    assert ("".join(parts), hit) == ("c", "at")


def test_held_back_text_is_emitted_at_the_end() -> None:
    subject = detokenizer("byte-level", [], ("mat!",))
    parts, _ = _push_text(subject, "the mat")
    assert "".join(parts) + subject.flush() == "the mat"


def test_before_min_tokens_a_stop_string_does_not_stop() -> None:
    subject = detokenizer("byte-level", [], ("a",))
    (token,) = TOKENIZERS["byte-level"].encode("a").ids
    assert subject.push(token, may_stop=False) == ("a", None)


def test_the_demo_tokenizer_round_trips(tmp_path: Path) -> None:
    from caraserve import demo

    tokenizer = Tokenizer.from_file(str(demo.model_folder() / "tokenizer.json"))
    ids = tokenizer.encode("Tell me about the sea.").ids
    subject = Detokenizer(tokenizer.decode, ids[:2])
    assert "".join(subject.push(token)[0] for token in ids[2:]) + subject.flush() in "Tell me about the sea."
