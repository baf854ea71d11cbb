"""The texts of single tokens, as far as they do not depend on the tokens around them."""

import json
import re
from typing import Any

from tokenizers import Tokenizer

# Parts of decoders that look at one token at a time. Those of bytes join them, so tokens that are parts of characters
# have no text here; `Strip` takes a space from the beginning of the whole text alone.
_SEPARATE = frozenset({"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token of a byte


class TokenTexts:
    """Finds the text that a token adds after other text. Decoding it takes 5 µs, a look-up 0.1."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str | None] = {}
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._are_separate = _decodes_separately(tokenizer)

    def __call__(self, token_id: int) -> str | None:
        """Returns the text. None: it may depend on other tokens, or on what is skipped, or the token has no text."""
        try:
            return self._known[token_id]
        except KeyError:
            text = self._known[token_id] = self._find(token_id)
            return text

    def _find(self, token_id: int) -> str | None:
        token = self._tokenizer.id_to_token(token_id)
        if not self._are_separate or token is None or token_id in self._added or BYTE.fullmatch(token):
            return None
        once, twice = self._tokenizer.decode([token_id]), self._tokenizer.decode([token_id, token_id])
        text = str(twice[len(once) :])  # after the first token a decoder strips no space
        return None if "\ufffd" in text else text or None


def decoder_parts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns the steps by which tokens become text, as tokenizer.json has them; none without a decoder."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder.get("decoders", [decoder]))


def _decodes_separately(tokenizer: Tokenizer) -> bool:
    parts = decoder_parts(tokenizer)
    return bool(parts) and all(part["type"] in _SEPARATE and _is_of_one_token(part) for part in parts)


def _is_of_one_token(part: dict[str, Any]) -> bool:
    """Returns whether a replacement cannot span tokens, and nothing is stripped at the end of a text."""
    if part["type"] == "Strip":
        return bool(part["stop"] == 0)
    return part["type"] != "Replace" or len(part["pattern"].get("String", "  ")) == 1
