"""Reads the fields that forbid tokens of an answer, `allowed_token_ids` and `bad_words`, as vLLM names them."""

import asyncio

from caraserve.core.grammar import Grammar
from caraserve.core.request import SamplingParams
from caraserve.core.token_filter import TokenFilter
from caraserve.errors import InvalidRequest
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown, token_ids
from caraserve.loop import Engine
from caraserve.tokenizer.tokenizer import Tokenizer
from caraserve.util.tasks import in_turns

_MAX_WORDS_CHARACTERS = 8192  # of all bad words: about a thousand words


async def with_banned_tokens(
    fields: Fields, engine: Engine, params: SamplingParams, grammar: Grammar | None
) -> Grammar | None:
    """Returns the grammar with the request's banned tokens applied to it. Raises InvalidRequest that names the
    field."""
    vocab_size = engine.tokenizer.vocab_size
    allowed = token_ids("allowed_token_ids", body_fields.ALLOWED_TOKEN_IDS.read(fields), vocab_size)
    if fields.raw("allowed_token_ids") == []:
        raise InvalidRequest("allowed_token_ids is empty; name at least one token.", param="allowed_token_ids")
    words = body_fields.BAD_WORDS.read(fields)
    if not allowed and not words:
        return grammar
    if (size := sum(len(word) for word in words if isinstance(word, str))) > _MAX_WORDS_CHARACTERS:
        raise InvalidRequest(
            f"bad_words have {size} characters together; {_MAX_WORDS_CHARACTERS} are allowed.", param="bad_words"
        )
    banned = [ids async for word in in_turns(words) for ids in _sequences(word, engine.tokenizer)]
    return await asyncio.to_thread(  # 10 ms for the longest lists
        TokenFilter.of,
        vocab_size,
        allowed or None,
        banned,
        end_ids=params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *engine.tokenizer.eos_ids),
        min_tokens=params.min_tokens,
        grammar=grammar,
    )


def _sequences(word: object, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of a word at the beginning of a text, and within one, if there a space makes another first token
    of it. These are vLLM's, which takes only the first where the two differ in length."""
    if not isinstance(word, str) or not 1 <= len(word) <= body_fields.MAX_BAD_WORD_CHARACTERS or not word.strip():
        raise InvalidRequest(
            f"bad_words must hold strings of 1 to {body_fields.MAX_BAD_WORD_CHARACTERS} characters that are not only "
            f"white space, not {shown(word)}.",
            param="bad_words",
        )
    first = tokenizer.encode(word.lstrip(), add_special_tokens=False)
    spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
    is_other = bool(first and spaced) and first[0] != spaced[0] and len(first) == len(spaced)
    return [ids for ids in (first, spaced if is_other else []) if ids]
