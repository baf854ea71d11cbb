"""Text ↔ token ids, from a Hugging Face folder's `tokenizer.json`.

Of the library's calls only those for a batch release the interpreter lock. So long texts are encoded and decoded as
batches of one, which block no other thread.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as _Tokenizer

from caraserve.core.request import SAMPLING_RANGES
from caraserve.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from caraserve.model.gguf.files import read_metadata
from caraserve.model.opened_file import TensorFileError
from caraserve.model.plan import DecoderPlan
from caraserve.model.sentence_format import LAST_TOKEN, SentenceFormat, read_sentence_format
from caraserve.telemetry.prometheus import family
from caraserve.tokenizer.adapter_templates import AdapterTemplates
from caraserve.tokenizer.chat_template import ChatTemplate
from caraserve.tokenizer.detokenizer import Decode, Detokenizer
from caraserve.tokenizer.gguf_tokenizer import PAD_KEY, disagreement, read_settings, read_tokenizer
from caraserve.tokenizer.grammar import GrammarCompiler
from caraserve.tokenizer.reasoning import ReasoningFormat, detect_reasoning, reasoning_tokens
from caraserve.tokenizer.token_texts import BYTE, TokenTexts, decoder_parts
from caraserve.tokenizer.tool_format import ToolFormat

# Encoding runs at a few MB/s: longer texts would block the event loop for over a millisecond.
ENCODED_IN_PLACE_CHARACTERS = 2048
_SHOWN_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces")
_MAX_JSON_BYTES = 64 << 20
_SPACE_MARK = "\u2581"  # SentencePiece's visible space
# The length of a text in tokens is first estimated from pieces of this size, at 10 ms each, so that only the beginning
# of a far too long text is encoded. Pieces have a few more tokens than the whole, never twice as many.
_PIECE_CHARACTERS = 16 << 10
_PIECES_TO_WHOLE = 2
_DECODED_AT_ONCE_TOKENS = 1024  # 0.3 µs each
# A batch of one gains nothing from the library's threads, and would wait for them while they encode other texts.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """How a model that was trained to fill in the middle is given the texts before and after a gap: the special tokens
    before each of the two, and at the end of the prompt."""

    before_prefix: str
    before_suffix: str
    end: str = ""
    suffix_first: bool = False

    def prompt(self, prefix: str, suffix: str) -> str:
        """Returns the prompt whose answer is the text of the gap."""
        first, second = self.before_prefix + prefix, self.before_suffix + suffix
        return (second + first if self.suffix_first else first + second) + self.end

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.before_prefix, self.before_suffix, self.end)))


_INFILL_FORMATS = (
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillFormat("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


def find_infill_format(has_token: Callable[[str], bool]) -> InfillFormat | None:
    """Returns the first format all of whose special tokens the vocabulary has."""
    return next((one for one in _INFILL_FORMATS if all(map(has_token, one.tokens))), None)


class Tokenizer:
    """One model's tokenizer, chat template, end tokens and default sampling."""

    def __init__(
        self,
        tokenizer: _Tokenizer,
        vocab_size: int,
        eos_ids: frozenset[int],
        chat_template: ChatTemplate | None,
        default_sampling: Mapping[str, Any],
        info: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        tool_call_parser: str | None = None,
        excludes_unused_tools: bool = False,
        pad_id: int | None = None,
        sentences: SentenceFormat = LAST_TOKEN,
    ) -> None:
        """`info`: what clients may see. `excludes_unused_tools`: a prompt has no tools if its answer may call none.
        `sentences`: how texts are embedded."""
        self.vocab_size = vocab_size  # of the model: all ids in [0, vocab_size) are valid, also those without a token
        self.eos_ids = eos_ids
        self.sentences = sentences
        self.pad_id = pad_id  # in config.json; None if it has none
        self.default_sampling = default_sampling
        self.info = info
        self.excludes_unused_tools = excludes_unused_tools
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._texts = TokenTexts(tokenizer)
        self._bytes_of_token: dict[int, bytes] = {}  # a cache: logprobs name up to 20 tokens for each one
        is_byte_level = any(part["type"] == "ByteLevel" for part in decoder_parts(tokenizer))
        self._bytes_of_char = _byte_level_alphabet() if is_byte_level else None
        self.grammars = GrammarCompiler(tokenizer.to_str, vocab_size, sorted(eos_ids))
        encode = partial(self.encode, add_special_tokens=False)
        marks = reasoning_tokens(tokenizer.get_vocab(), encode, self.token_bytes)
        self.adapter_templates = AdapterTemplates(special_tokens, tool_call_parser, marks)
        # How the model writes its reasoning; None if its chat template shows none, or its tokens have no marks for it.
        self.reasoning_format: ReasoningFormat | None = None
        if chat_template is not None:
            self.reasoning_format = detect_reasoning(chat_template.source, chat_template.arguments, marks)

    def families(self, labels: str) -> Iterator[str]:
        """Returns the families of grammars and adapters' chat templates for GET /metrics."""
        text = "Memory that counts for compiled grammars, in use or kept."
        yield family("caraserve:compiled_grammar_bytes", "gauge", text, [(labels, self.grammars.num_bytes)])
        text = "Grammars that wait to be compiled."
        yield family("caraserve:grammars_waiting", "gauge", text, [(labels, self.grammars.num_waiting)])
        text = "Requests that wait for their adapter's chat template to be rendered."
        yield family("caraserve:templates_waiting", "gauge", text, [(labels, self.adapter_templates.num_waiting)])

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Returns token ids, by default with the model's special tokens at begin and end.

        Raises ContextLengthExceeded above `max_tokens`; a far longer text is not encoded to its end.
        """
        return self._ids(text, add_special_tokens, max_tokens, "prompt")

    def encode_pair(self, first: str, second: str, *, add_special_tokens: bool = True, max_tokens: int) -> list[int]:
        """Returns the token ids of two texts in one, joined as the tokenizer's file has it. Raises
        ContextLengthExceeded as `encode` does."""
        for text in (first, second):
            if len(text) > _PIECE_CHARACTERS:
                self._refuse_far_too_long(text, max_tokens, "prompt")
        ids = list(self._tokenizer.encode(first, second, add_special_tokens=add_special_tokens).ids)
        if len(ids) > max_tokens:
            raise _too_long(len(ids), max_tokens, "prompt")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids; unknown ids have no text."""
        ids = list(ids)
        if len(ids) <= _DECODED_AT_ONCE_TOKENS:  # not worth releasing the interpreter lock
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat_template is not None

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None if its chat template does not show it."""
        return self._chat_template.tool_format if self._chat_template is not None else None

    @property
    def renders_tools(self) -> bool:
        """Whether prompts can show tools."""
        return self._chat_template is not None and self._chat_template.renders_tools

    @property
    def infill_format(self) -> InfillFormat | None:
        """How the model is given the texts before and after a gap; None if its vocabulary has no tokens for that."""
        return find_infill_format(self.has_token)

    def has_token(self, text: str) -> bool:
        """Returns whether a token is written as `text`."""
        try:
            return self._tokenizer.token_to_id(text) is not None
        except UnicodeEncodeError:  # half of a character, which JSON can have
            return False

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token that is written as `text`; None if there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def _decode_without(self, dropped: Set[int], ids: Sequence[int]) -> str:
        return self.decode([one for one in ids if one not in dropped], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token."""
        known = self._bytes_of_token.get(token_id)
        if known is None:
            known = self._bytes_of_token[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return str(token).encode()
        if self._bytes_of_char is not None:
            return b"".join(
                bytes([self._bytes_of_char[char]]) if char in self._bytes_of_char else char.encode() for char in token
            )
        if (byte := BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return str(token).replace(_SPACE_MARK, " ").encode()

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token for logprobs; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation. Raises InvalidRequest without a template or when it rejects the
        messages, and ContextLengthExceeded as `encode` does."""
        if self._chat_template is None:
            raise InvalidRequest(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        text = self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs or {},
            tools=tools,
        )
        return self.encode_chat(text, max_tokens=max_tokens)

    def encode_chat(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a conversation that a template has rendered, which writes the special tokens. Raises
        ContextLengthExceeded as `encode` does."""
        return self._ids(text, False, max_tokens, "messages")

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        kept_special_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Returns the incremental detokenizer of one request's output. `kept_special_ids` are not skipped."""
        decode: Decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens and kept_special_ids:
            decode = partial(self._decode_without, self.special_ids - kept_special_ids)
        return Detokenizer(decode, prompt_ids, stop=stop, include_stop=include_stop, text_of_token=self._texts)

    def _ids(self, text: str, add_special_tokens: bool, max_tokens: int | None, source: str) -> list[int]:
        if max_tokens is not None and len(text) > _PIECE_CHARACTERS:
            self._refuse_far_too_long(text, max_tokens, source)
        encoding = self._encode(text, add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise _too_long(len(encoding), max_tokens, source)
        return list(encoding.ids)

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _refuse_far_too_long(self, text: str, max_tokens: int, source: str) -> None:
        counted = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            counted += len(self._encode(text[start : start + _PIECE_CHARACTERS], add_special_tokens=False))
            if counted > _PIECES_TO_WHOLE * max_tokens:
                raise _too_long(counted // _PIECES_TO_WHOLE, max_tokens, source)


def load_tokenizer(
    folder: Path,
    plan: DecoderPlan,
    chat_template: Path | None,
    tool_call_parser: str | None = None,
    *,
    excludes_unused_tools: bool = False,
) -> Tokenizer:
    """Reads tokenizer.json and the files beside it, or the tokenizer of a GGUF file. `tool_call_parser`: of
    `TOOL_FORMATS`, else by the template. `excludes_unused_tools` as for `Tokenizer`.

    Raises ModelLoadError that names the file."""
    stored = _stored_in_file(folder) if folder.is_file() else _stored_in_folder(folder)
    settings = stored.settings
    stored.tokenizer.no_truncation()
    stored.tokenizer.no_padding()
    _check_sampling(stored.sampling, folder)
    special_tokens = _special_tokens(settings)
    template = ChatTemplate.load(folder, settings, chat_template, special_tokens, tool_call_parser)
    info = _info(settings, template)
    return Tokenizer(
        *(stored.tokenizer, plan.vocab_size, stored.ends, template, stored.sampling, info, special_tokens),
        tool_call_parser,
        excludes_unused_tools=excludes_unused_tools,
        pad_id=stored.pad_id,
        sentences=read_sentence_format(folder),
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a model's files say of its tokenizer. `settings`: as tokenizer_config.json has them."""

    tokenizer: _Tokenizer
    settings: Mapping[str, Any]
    ends: frozenset[int]
    sampling: Mapping[str, Any]
    pad_id: int | None


def _check_sampling(sampling: Mapping[str, Any], path: Path) -> None:
    """Raises ModelLoadError for a default with which no request could be answered."""
    for name, value in sampling.items():
        low, high, above_low = SAMPLING_RANGES[name]
        is_number = type(value) in ((int,) if name == "top_k" else (int, float))
        if not (is_number and low <= value <= high) or (above_low and value == low):
            kind = "a whole number" if name == "top_k" else "a number"
            sign = "above" if above_low else "of at least"
            source = path if path.is_file() else path / "generation_config.json"
            raise ModelLoadError(f"{source}: {name} is {value!r}; it must be {kind} {sign} {low} and at most {high}")


def _stored_in_folder(folder: Path) -> _Stored:
    tokenizer = _tokenizer_in(folder)
    settings = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    config = _read_json(folder / "config.json")
    ends = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    if isinstance(text := config.get("text_config"), dict):  # of a text model inside a model with images
        ends |= _ids(text.get("eos_token_id"))
    eos_token = _token_text(settings.get("eos_token"))
    if not ends and eos_token and (eos_id := tokenizer.token_to_id(eos_token)) is not None:
        ends = {eos_id}
    sampling = {
        name: generation[name]
        for name in SAMPLING_RANGES
        if generation.get("do_sample") and isinstance(generation.get(name), int | float)
    }
    pad_id = config.get("pad_token_id")
    return _Stored(tokenizer, settings, frozenset(ends), sampling, pad_id if isinstance(pad_id, int) else None)


def _stored_in_file(path: Path) -> _Stored:
    """Reads a GGUF file. The tokenizer.json of a folder that has one is used, if it is of the same model."""
    try:
        metadata = read_metadata(path)
    except TensorFileError as error:
        raise ModelLoadError(str(error)) from error
    pad_id = metadata.get(PAD_KEY)
    beside = path.parent / "tokenizer.json"
    if not beside.is_file():
        tokenizer, made = read_tokenizer(metadata, path.name)
        settings = made.settings
    else:
        tokenizer = _tokenizer_in(path.parent)
        if problem := disagreement(tokenizer, metadata):
            raise ModelLoadError(f"{beside} is used instead of the tokenizer in {path.name}, and is another: {problem}")
        made = read_settings(metadata, path.name)
        settings = made.settings | _read_json(path.parent / "tokenizer_config.json")
    return _Stored(tokenizer, settings, made.ends, made.sampling, pad_id if isinstance(pad_id, int) else None)


def _tokenizer_in(folder: Path) -> _Tokenizer:
    """Reads tokenizer.json. Raises ModelLoadError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
    try:
        return _Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} is not a valid tokenizer: {error}") from None


def _too_long(tokens: int, max_tokens: int, source: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_tokens} tokens. However, the {source} alone "
        f"{'have' if source == 'messages' else 'has'} at least {tokens} tokens.",
        param=source,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty without the file. Raises ModelLoadError."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError("it is too large")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {token_id for token_id in values if isinstance(token_id, int)}


def _token_text(value: Any) -> str | None:
    """Returns the text of a token in tokenizer_config.json, which is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return {name: text for name in names if (text := _token_text(settings.get(name)))}


def _info(settings: Mapping[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    """Returns the special tokens, flags and chat template of a model, as vLLM names them. Other settings, some of which
    are paths of the machine that made the model, are left out."""
    more = settings.get("additional_special_tokens")
    flags = {name: value for name in _SHOWN_FLAGS if isinstance(value := settings.get(name), bool)}
    name = settings.get("tokenizer_class")
    return {
        "tokenizer_class": name if isinstance(name, str) else "PreTrainedTokenizerFast",
        **_special_tokens(settings),
        "additional_special_tokens": list(filter(None, map(_token_text, more if isinstance(more, list) else ()))),
        **flags,
        **({} if template is None else {"chat_template": template.source}),
    }


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each printable character with which byte-level BPE writes bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
