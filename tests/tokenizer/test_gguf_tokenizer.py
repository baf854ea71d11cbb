"""Tokenizers in GGUF files make the tokens of the original ones, on texts of every kind."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CohereTokenizer, GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from caraserve.errors import ModelLoadError
from caraserve.tokenizer.gguf_tokenizer import SPLITTINGS, disagreement, read_settings, read_tokenizer

CORPUS = [
    "The price's $12.50, don't you think? I'll say: they've got 12345 of them.\n\n  def f(x):\n\treturn x**2  # x\r\n",
    "Ünïcödé café naïve — «quotes» … 日本語テキスト 漢字かな交じり 한국어 텍스트 हिन्दी में العربية",
    "ภาษาไทย ๑๒๓ ไม่มีเว้นวรรค 12345678 1,234,567.89 ١٢٣٤ ａｂｃ！？ Հայերեն ქართული ॥ ǄʼK    \t \n\n   x==y;//{z}",
    "CamelCaseWords HTTPServer iPhone x86_64 e\u0301 nai\u0308ve 👩‍👩‍👧 🎉🇩🇪 \u00a0 \u3000 tabs\t\tend   ",
]
SPECIAL = ["<|end|>", "<|start|>", "<think>"]
_rng = random.Random(0)
_POOL = [*"abcABC  \n\t\r.,'\"0123456789éß漢字🎉▁<>|_-/\u0301\u00a0", "<|end|>", "<think>", "'ll", "don't", "\n\n"]
TEXTS = [
    *CORPUS,
    *("", " ", "  leading", "trailing  ", "<|start|>user\nhi<|end|>\n", "a" * 90, " " * 40 + "x", "\x00\x01", "½ ² Ⅷ"),
    *("".join(_rng.choice(_POOL) for _ in range(_rng.randint(1, 40))) for _ in range(250)),
]


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns a small byte-level vocabulary and its merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(one) for one in model["merges"]]


VOCAB, MERGES = trained()
TOKENS = [*sorted(VOCAB, key=VOCAB.__getitem__), *SPECIAL]


def byte_level(pre: str, **changed: Any) -> dict[str, Any]:
    """Returns the metadata of a byte-level tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * len(VOCAB) + [3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(one) for one in MERGES],
        "tokenizer.ggml.eos_token_id": len(VOCAB),
        "tokenizer.ggml.bos_token_id": len(VOCAB) + 1,
        **changed,
    }


def with_split(expression: str) -> Callable[..., Any]:
    """Returns a class of tokenizers that split by an expression."""

    def make(**fields: Any) -> Any:
        made = GPT2Tokenizer(**fields)
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return made

    return make


def with_digits(**fields: Any) -> Any:
    made = GPT2Tokenizer(**fields)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


# By `pre`: what makes the tokenizer of a published model of that kind.
ORIGINALS: dict[str, Callable[..., Any]] = {
    **{name: with_split(expression) for name, expression in GGUF_PRE_TOKENIZER_SPLITS.items() if name in SPLITTINGS},
    "gpt-2": GPT2Tokenizer,
    "phi-2": GPT2Tokenizer,
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
    "command-r": CohereTokenizer,
    "smollm": with_digits,
    "starcoder": with_digits,
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_tokenizers_agree_with_the_original(pre: str) -> None:
    made, _ = read_tokenizer(byte_level(pre, **{"tokenizer.ggml.add_bos_token": False}), "m.gguf")
    original = ORIGINALS[pre](vocab=dict(VOCAB), merges=MERGES).backend_tokenizer
    original.model.ignore_merges = SPLITTINGS[pre].takes_whole
    original.add_special_tokens(SPECIAL[:2])
    original.add_tokens(SPECIAL[2:])
    ids = [original.token_to_id(token) for token in SPECIAL]
    renamed = dict(zip(ids, range(len(VOCAB), len(TOKENS)), strict=True))
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text).ids == [renamed.get(one, one) for one in expected], repr(text)


# By `pre`: expressions as llama.cpp has them, one after another.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SUFFIX = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("exaone4", "trillion", "granite-docling", "a.x-4.0", "mellum", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("exaone", "minerva-7b", "codeshell", "mellum2", "refact"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    "seed-coder": (_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,),
    "minicpm5": (
        r"\p{N}{1,3}",
        _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
    ),
    "tiny_aya": (
        r"\d{1,3}(?=(?:\d{3})*\b)",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*{_SUFFIX}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
    ),
    **dict.fromkeys(
        ("hunyuan-dense", "joyai-llm"),
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
        ),
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
    **dict.fromkeys(("poro-chat", "bloom"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
}


@pytest.mark.parametrize("pre", EXPRESSIONS)
def test_texts_are_split_by_the_expressions_of_a_name(pre: str) -> None:
    made, _ = read_tokenizer(byte_level(pre), "m.gguf")
    splits = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in EXPRESSIONS[pre]]
    wanted = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in TEXTS:
        assert made.pre_tokenizer.pre_tokenize_str(text) == wanted.pre_tokenize_str(text), repr(text)


def test_letters_of_alphabets_are_words_for_deepseek() -> None:
    """Its list has no small letters of Armenian, and its range of Asian ones has those of Greek with accents."""
    made, _ = read_tokenizer(byte_level("deepseek-llm"), "m.gguf")
    split = pre_tokenizers.Sequence([*made.pre_tokenizer][:-1])
    for text, words in (
        ("if x == 10:\n\treturn Ωμέγα", ["if", " x", " ==", " ", "1", "0", ":", "\n", "\treturn", " Ωμέγα"]),
        ("中文, テスト。 한국어 ภาษา  ", ["中文", ",", " ", "テスト", "。", " ", "한국어", " ", "ภาษา", "  "]),
        ("Հայ ἀ\u1f7d\u212a𐐀 ", ["Հ", "այ", " ", "ἀ\u1f7d\u212a", "𐐀", " "]),
    ):
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == words


def test_texts_begin_with_a_token_where_the_file_or_its_kind_says_so() -> None:
    begin = len(VOCAB) + 1
    for pre, changed, adds in (
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ):
        made, settings = read_tokenizer(byte_level(pre, **changed), "m.gguf")
        assert (made.encode("x").ids[0] == begin) is adds
        assert settings.settings["add_bos_token"] is adds
        assert made.decode(made.encode("x <|end|> <think>").ids) == "x  <think>"


def pieces(**changed: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the metadata of a SentencePiece tokenizer, and its vocabulary: with bytes, scores by rank."""
    words = [
        "▁",
        *"abcdefghijklmnopqrstuvwxyzTHX.,0123456789",
        "▁t",
        "he",
        "▁the",
        "in",
        "▁a",
        "er",
        "▁in",
        "the",
        "▁▁",
    ]
    words += ["on", "ing", "▁o", "▁on", "st", "▁▁▁", "cat", "at", "ca"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<turn>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["  " if token == "▁▁" else token for token in tokens],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * len(words)), 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": len(tokens) - 1,
        "tokenizer.ggml.unknown_token_id": 0,
        **changed,
    }
    return metadata, {token: index for index, token in enumerate(tokens)}


def merges_of(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns every pair of pieces that makes a piece, by the rank of what they make, the longest first piece first."""
    found = []
    for token, rank in vocab.items():
        pairs = [(token[:at], token[at:]) for at in range(len(token) - 1, 0, -1)]
        found += [(rank, pair) for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    return [pair for _, pair in sorted(found, key=lambda one: one[0])]


def test_pieces_without_a_prefix_agree_with_gemma() -> None:
    metadata, vocab = pieces(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    made, _ = read_tokenizer(metadata, "m.gguf")
    original = GemmaTokenizer(
        vocab=vocab, merges=merges_of(vocab), bos_token="<s>", eos_token="</s>", pad_token=None, mask_token=None
    )
    original.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    for text in (*TEXTS, "the cat in the station", "<turn>the<turn> cat", "   the"):
        assert made.encode(text).ids == original.backend_tokenizer.encode(text, add_special_tokens=False).ids, repr(
            text
        )
        assert made.decode(made.encode(text).ids) == original.decode(made.encode(text).ids, skip_special_tokens=True)


def test_pieces_with_a_prefix_agree_with_llama_2() -> None:
    metadata, vocab = pieces()
    made, settings = read_tokenizer(metadata, "m.gguf")
    original = Tokenizer(
        models.BPE(vocab=vocab, merges=merges_of(vocab), fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    )
    original.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    original.add_special_tokens(["<unk>", "<s>", "</s>", "<turn>"])
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert settings.ends == {2, vocab["<turn>"]}
    for text in (*TEXTS, "the cat in the station", "<turn>the<turn> cat", "   the"):
        assert made.encode(text).ids == [1, *original.encode(text).ids], repr(text)
        assert made.decode(made.encode(text).ids) == original.decode(original.encode(text).ids)


def test_templates_ends_and_sampling_are_read() -> None:
    metadata = byte_level(
        "qwen2",
        **{
            "tokenizer.chat_template": "{{ a }}",
            "tokenizer.chat_template.tools": "{{ b }}",
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 20,
        },
    )
    found = read_settings(metadata, "m.gguf")
    assert found.settings["chat_template"] == [
        {"name": "default", "template": "{{ a }}"},
        {"name": "tools", "template": "{{ b }}"},
    ]
    assert (found.settings["eos_token"], found.ends) == ("<|end|>", {len(VOCAB)})
    assert found.sampling == {"temperature": 0.5, "top_k": 20}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown rule": (
        {"tokenizer.ggml.pre": "falcon"},
        "tokenizer.ggml.pre is 'falcon'; it names no rule that is known here: put the tokenizer.json",
    ),
    "no rule": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None; it names no rule"),
    "another kind": (
        {"tokenizer.ggml.model": "t5"},
        "tokenizer.ggml.model is 't5'; it is not read; gpt2 and llama are",
    ),
    "no tokens": ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is []; it must have all tokens"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a"] * len(TOKENS)}, "has a token twice"),
    "numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "must be a list of up to"),
    "a wrong merge": ({"tokenizer.ggml.merges": ["no such"]}, "its tokens and merges make no tokenizer"),
    "a flag": ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1; it must be true or false"),
    "an id": ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is 'x'; it must be a number"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_is_refused_by_name(kind: str) -> None:
    changed, why = REFUSED[kind]
    with pytest.raises(ModelLoadError) as caught:
        read_tokenizer(byte_level("qwen2", **changed), "m.gguf")
    assert why in caught.value.message
    assert caught.value.message.startswith("m.gguf: ")


def test_a_tokenizer_of_another_model_beside_the_file_is_seen() -> None:
    made, _ = read_tokenizer(byte_level("qwen2"), "m.gguf")
    assert disagreement(made, byte_level("gpt-2")) == ""
    others = [*TOKENS[1:], TOKENS[0]]
    assert "token 0 is '!' there" in disagreement(made, byte_level("gpt-2", **{"tokenizer.ggml.tokens": others}))
    without_types = {"tokenizer.ggml.tokens": others, "tokenizer.ggml.token_type": None}
    assert "token 0 is '!' there" in disagreement(made, byte_level("gpt-2", **without_types))
