"""The tokenizer in a GGUF file, with the settings that tokenizer_config.json would have.

The file names how text is split before merges (`tokenizer.ggml.pre`), and has no rule for it. So only names are read
whose rule is known; another one is refused, because a near rule makes other tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from caraserve.errors import ModelLoadError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SYMBOLS + _ENDS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SYMBOLS + _ENDS
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _ENDS
_TEKKEN = _CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _ENDS
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _ENDS
_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _ENDS
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Of several alphabets, but for instance without small letters of Armenian.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN,
)
_DEEPSEEK_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _ENDS
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is cut before merges: by expressions one after another, or as GPT-2 does it, after single digits or not.
    `takes_whole`: a piece that is a token is one, whatever merges would make of it."""

    expressions: tuple[str, ...] = ()  # none: as GPT-2
    single_digits: bool = False
    composes: bool = False  # characters, first (NFC)
    takes_whole: bool = False
    adds_bos: bool = False  # if the file does not say


_OF_LLAMA3 = Splitting((_LLAMA3,), takes_whole=True, adds_bos=True)
SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _OF_LLAMA3),
    **dict.fromkeys(("lfm2", "jina-v5-nano"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting((_LLAMA3,))),
    "minicpm5": Splitting((r"\p{N}{1,3}", _LLAMA3), takes_whole=True),
    "qwen2": Splitting((_QWEN2,), composes=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), Splitting((_QWEN2,))),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), Splitting((_QWEN2,))),
    "qwen35": Splitting((_QWEN35,), composes=True),
    "tekken": Splitting((_TEKKEN,), takes_whole=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Splitting((_GPT4O,))),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splitting((_THOUSANDS, _GPT4O))),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "trillion", "granite-docling"), Splitting()),
    **dict.fromkeys(("a.x-4.0", "mellum", "gigachat"), Splitting()),
    **dict.fromkeys(("mpt", "olmo"), Splitting(composes=True)),  # as GPT-NeoX
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone"), Splitting(single_digits=True)),
    **dict.fromkeys(("minerva-7b", "codeshell", "mellum2"), Splitting(single_digits=True)),
    "command-r": Splitting(single_digits=True, composes=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Splitting((r"\p{N}{1,3}", _HAN, _DEEPSEEK3))),
    "deepseek-llm": Splitting(_DEEPSEEK, single_digits=True),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER, single_digits=True),
    "seed-coder": Splitting((_SEED,)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Splitting((_BLOOM,))),
    "viking": Splitting((_BLOOM,), single_digits=True),
}
_INSTEAD = "put the tokenizer.json of the original model beside the file"

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
PAD_KEY = "tokenizer.ggml.padding_token_id"
_SPACE = "\u2581"  # SentencePiece's visible space
_MOST_PIECES_CHARS = 1 << 28  # squares of tokens' lengths, which finding merges takes
_MOST_TOKENS = 1 << 22
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS_BY_KEY = ("eos", "eot", "eom")
# Tokens that end a turn, whatever keys say, where they are control tokens.
_ENDS_BY_TEXT = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")


class _Type(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufSettings:
    """What a file says beside its tokens. `settings`: as tokenizer_config.json has them; `ends`: the tokens that end an
    answer; `sampling`: defaults of requests' fields."""

    settings: dict[str, Any]
    ends: frozenset[int]
    sampling: Mapping[str, float]


def read_tokenizer(metadata: Mapping[str, Any], name: str) -> tuple[Tokenizer, GgufSettings]:
    """Makes the tokenizer of a file, whose name is `name`. Raises ModelLoadError."""
    reader = _Reader(metadata, name)
    return reader.tokenizer(), reader.settings()


def read_settings(metadata: Mapping[str, Any], name: str) -> GgufSettings:
    """Reads a file's settings, for which its tokens need not be understood. Raises ModelLoadError."""
    return _Reader(metadata, name).settings()


class _Reader:
    """Reads the metadata of one file. Methods raise ModelLoadError."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self._metadata, self._name = metadata, name
        self._model = metadata.get(f"{_PREFIX}model")
        self.tokens = self._list("tokens", str, _MOST_TOKENS) or []
        if not self.tokens:
            raise self._refusal("tokens", "must have all tokens of the model")
        self._types = self._list("token_type", int, len(self.tokens)) or [int(_Type.NORMAL)] * len(self.tokens)
        if len(self._types) != len(self.tokens):
            raise self._refusal("token_type", f"must have an element for each of {len(self.tokens)} tokens")
        if self._model == "llama":
            self.tokens = [_SPACE * len(one) if len(one) > 1 and not one.strip(" ") else one for one in self.tokens]
        self._ids = {token: index for index, token in enumerate(self.tokens)}

    def tokenizer(self) -> Tokenizer:
        if self._model not in ("gpt2", "llama"):
            raise self._refusal("model", f"is not read; gpt2 and llama are: {_INSTEAD}")
        if len(self._ids) != len(self.tokens) or "" in self._ids:
            raise ModelLoadError(f"{self._name}: {_PREFIX}tokens has a token twice, or one without text; {_INSTEAD}")
        made = self._byte_level() if self._model == "gpt2" else self._sentencepiece()
        self._add_tokens(made)
        self._add_ends(made, **self._flags())
        return made

    def settings(self) -> GgufSettings:
        special = {setting: self.tokens[at] for setting, key in _SPECIAL.items() if (at := self._id(key)) is not None}
        settings = {**special, **self._flags(), **self._templates()}
        return GgufSettings(settings, self._answer_ends(), self._sampling())

    def _flags(self) -> dict[str, bool]:
        pre = str(self._metadata.get(f"{_PREFIX}pre"))
        adds_bos = self._model == "llama" or (pre in SPLITTINGS and SPLITTINGS[pre].adds_bos)
        defaults = {"add_bos_token": adds_bos, "add_eos_token": False}
        return {key: self._flag(key, default=default) for key, default in defaults.items()}

    # --- kinds of tokenizers ---

    def _byte_level(self) -> Tokenizer:
        pre = self._metadata.get(f"{_PREFIX}pre")
        if not isinstance(pre, str) or pre not in SPLITTINGS:
            raise self._refusal("pre", f"names no rule that is known here: {_INSTEAD}")
        how = SPLITTINGS[pre]
        made = Tokenizer(self._bpe(self._merges(), ignore_merges=how.takes_whole))
        if how.composes:
            made.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in how.expressions]
        if how.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not how.expressions))
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
        made.decoder = decoders.ByteLevel()
        return made

    def _sentencepiece(self) -> Tokenizer:
        """Makes BPE of pieces with byte fallback. A space before the text is added as Llama 2's tokenizer.json and
        llama.cpp do it: after each special token."""
        merges = self._merges() if f"{_PREFIX}merges" in self._metadata else self._merges_of_pieces()
        unknown = self._id("unknown")
        made = Tokenizer(
            self._bpe(
                merges,
                fuse_unk=True,
                byte_fallback=True,
                unk_token=None if unknown is None else self.tokens[unknown],
            )
        )
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        spaces = normalizers.Replace(" ", _SPACE)
        if self._flag("add_space_prefix", default=True):
            made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
            steps.append(decoders.Strip(content=" ", left=1))
        else:
            made.normalizer = spaces
        made.decoder = decoders.Sequence(steps)
        return made

    def _bpe(self, merges: list[tuple[str, str]], **fields: Any) -> BPE:
        try:
            return BPE(vocab=self._ids, merges=merges, **fields)
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{self._name}: its tokens and merges make no tokenizer: {error!s:.200}") from None

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for one in self._list("merges", str, 2 * _MOST_TOKENS) or []:
            first, _, second = one.partition(" ") if not one.startswith(" ") else (" ", "", one[2:])
            merges.append((first, second))
        return merges

    def _merges_of_pieces(self) -> list[tuple[str, str]]:
        """Returns every pair of pieces that makes a piece, the best first: by the scores of what they make, or, in
        files of Gemma, whose scores do not follow the order of merges, by its place."""
        if sum(len(token) ** 2 for token in self.tokens) > _MOST_PIECES_CHARS:
            raise self._refusal("tokens", "are too long to find merges")
        by_place = str(self._metadata.get("general.architecture", "")).startswith("gemma")
        scores = [] if by_place else self._list("scores", float, len(self.tokens)) or []
        if not by_place and len(scores) != len(self.tokens):
            raise self._refusal("scores", f"must have a number for each of {len(self.tokens)} tokens")
        id_of = self._ids.get  # 2 million calls for the tokens of Gemma
        found = []
        for index, token in enumerate(self.tokens):
            if self._types[index] == _Type.UNUSED:
                continue
            rank, size = index if by_place else -scores[index], len(token)
            for at in range(size - 1, 0, -1):  # of equal ranks, the longest first piece comes first
                first = id_of(token[:at])
                if first is not None and (second := id_of(token[at:])) is not None:
                    found.append((rank, -at, at - size, index, first, second))
        if not by_place:
            found.sort()
        return [(self.tokens[first], self.tokens[second]) for *_, first, second in found]

    # --- tokens that are not pieces of text ---

    def _add_tokens(self, made: Tokenizer) -> None:
        """Adds the tokens that are found in a text before it is split: control tokens, and those of users."""
        special = {self._id(key) for key in _SPECIAL.values()}
        added = []
        for index, (token, kind) in enumerate(zip(self.tokens, self._types, strict=True)):
            is_special = kind in (_Type.CONTROL, _Type.UNKNOWN) or index in special
            if is_special or (kind == _Type.USER_DEFINED and token.strip(_SPACE)):
                added.append(AddedToken(token, special=is_special, normalized=False))
        made.add_tokens(added)

    def _add_ends(self, made: Tokenizer, *, add_bos_token: bool, add_eos_token: bool) -> None:
        """Adds tokens at the begin and the end of texts."""
        begin, end = self._id("bos") if add_bos_token else None, self._id("eos") if add_eos_token else None
        ids = [(self.tokens[index], index) for index in (begin, end) if index is not None]
        if not ids:
            return

        def around(part: str) -> list[str]:
            first = [] if begin is None else [self.tokens[begin]]
            return [*first, part, *([] if end is None else [self.tokens[end]])]

        made.post_processor = TemplateProcessing(
            single=around("$A"), pair=[*around("$A"), *around("$B")], special_tokens=ids
        )

    def _answer_ends(self) -> frozenset[int]:
        by_key = {self._id(key) for key in _ENDS_BY_KEY}
        by_text = {self._ids.get(text) for text in _ENDS_BY_TEXT}
        controls = {one for one in by_text if one is not None and self._types[one] == _Type.CONTROL}
        return frozenset(one for one in by_key | controls if one is not None)

    # --- values ---

    def _templates(self) -> dict[str, Any]:
        """Returns `chat_template`: the only one, or all by name."""
        default = self._metadata.get(_TEMPLATE)
        named = {
            key.removeprefix(f"{_TEMPLATE}."): value
            for key, value in self._metadata.items()
            if key.startswith(f"{_TEMPLATE}.") and isinstance(value, str)
        }
        if not isinstance(default, str):
            return {}
        if not named:
            return {"chat_template": default}
        return {
            "chat_template": [{"name": name, "template": text} for name, text in ({"default": default} | named).items()]
        }

    def _sampling(self) -> dict[str, float]:
        """Returns the sampling that the model was published with, by the names of requests' fields."""
        keys = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
        keys["penalty_repeat"] = "repetition_penalty"
        found = {field: self._metadata.get(f"general.sampling.{key}") for key, field in keys.items()}
        return {field: value for field, value in found.items() if isinstance(value, int | float)}

    def _id(self, key: str) -> int | None:
        """Returns the id of a token that a key names."""
        value = self._metadata.get(f"{_PREFIX}{key}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._refusal(f"{key}_token_id", "must be a number")
        return value if 0 <= value < len(self.tokens) else None

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self._refusal(key, "must be true or false")
        return value

    def _list(self, key: str, kind: type, most: int) -> list[Any] | None:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > most or not all(isinstance(one, kind) for one in value):
            raise self._refusal(key, f"must be a list of up to {most} values of one kind")
        return value

    def _refusal(self, key: str, why: str) -> ModelLoadError:
        value = ascii(self._metadata.get(_PREFIX + key, "absent"))[:80]
        return ModelLoadError(f"{self._name}: {_PREFIX}{key} is {value}; it {why}")


def disagreement(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> str:
    """Returns what differs between a tokenizer that lies beside a file and the tokens in the file; "" if nothing."""
    tokens, types = metadata.get(f"{_PREFIX}tokens"), metadata.get(f"{_PREFIX}token_type")
    for index, token in _compared(tokens, types):
        if tokenizer.id_to_token(index) != token:
            return (
                f"token {index} is {ascii(tokenizer.id_to_token(index))[:80]} there and {ascii(token)[:80]} in the file"
            )
    return ""


def _compared(tokens: Any, types: Any) -> Iterator[tuple[int, str]]:
    """Yields the tokens that both write alike: pieces of text."""
    if isinstance(tokens, list):
        kinds = types if isinstance(types, list) else [_Type.NORMAL] * len(tokens)  # as llama.cpp reads such files
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
            if kind == _Type.NORMAL and isinstance(token, str):
                yield index, token
