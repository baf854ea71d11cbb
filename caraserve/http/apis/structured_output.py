"""Reads the fields that constrain an answer, as OpenAI, vLLM, SGLang and llama.cpp name them, as one grammar; then the
fields that ban tokens, as vLLM names them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import orjson

from caraserve.core.grammar import Grammar
from caraserve.core.request import SamplingParams
from caraserve.core.token_filter import TokenFilter
from caraserve.errors import InvalidRequest
from caraserve.http.apis.reasoning import Reasoning
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown, token_ids
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.request_schema import RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from caraserve.loop import Engine
from caraserve.tokenizer.grammar import MAX_SOURCE_BYTES, GrammarKind, GrammarSource
from caraserve.tokenizer.tokenizer import Tokenizer
from caraserve.util.tasks import in_turns

_ANY_OBJECT = '{"type":"object"}'
_MAX_CHOICES = 1024
_MAX_TAGS = 128
_MAX_WORDS_CHARACTERS = 8192  # of all bad words: about a thousand words
# By the name of the field: what it holds. vLLM's older names, then SGLang's and llama.cpp's.
_PLAIN_FIELDS: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_STRUCTURED_OUTPUTS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_GRAMMAR_FIELDS = frozenset({"response_format", "structured_outputs", *_PLAIN_FIELDS})
AddCalls = Callable[[GrammarSource | None], GrammarSource | None]
"""Adds calls of tools to what the fields ask for."""


async def parse_grammar(
    fields: Fields,
    engine: Engine,
    params: SamplingParams,
    with_calls: AddCalls | None = None,
    reasoning: Reasoning | None = None,
) -> Grammar | None:
    """Returns the grammar that the answer must follow, after its reasoning if it has one; None without a grammar. It is
    not compiled yet. `with_calls`: if the answer may call tools. Raises InvalidRequest that names the field."""
    source = _grammar_source(fields, params, with_calls)
    grammar = None if source is None else engine.tokenizer.grammars.uncompiled(source)
    if reasoning is not None:
        grammar = reasoning.before(grammar, params, engine.tokenizer)
    return await _with_banned_tokens(fields, engine, params, grammar)


def _grammar_source(fields: Fields, params: SamplingParams, with_calls: AddCalls | None) -> GrammarSource | None:
    sources = list(_sources(fields)) if fields.has_any(_GRAMMAR_FIELDS) else []
    source = sources[0] if sources else None
    for other in sources[1:]:  # some clients send one grammar under an older and a newer name
        if (other.kind, other.text) != (sources[0].kind, sources[0].text):
            raise InvalidRequest(
                f"{sources[0].field} and {other.field} both constrain the answer; send one of them.",
                param=sources[0].field,
            )
    if with_calls is not None:
        source = with_calls(source)
    if source is None:
        return None
    if params.ignore_eos or params.min_tokens > 0:
        name = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise InvalidRequest(f"{name} contradicts {source.field}, whose grammar ends the answer.", param=name)
    # It is compiled later: an error then names the field that the client has sent.
    return replace(source, field=fields.client_names.get(source.field, source.field))


def _sources(fields: Fields) -> Iterator[GrammarSource]:
    yield from _response_format(fields)
    yield from _structured_outputs(fields)
    for name, kind in _PLAIN_FIELDS.items():
        yield from _source(kind, fields.raw(name), name)


def _response_format(fields: Fields) -> Iterator[GrammarSource]:
    name = "response_format"
    inner = fields.nested(name)
    check_fields(inner, RESPONSE_FORMAT)
    kind = inner.text("type", 64)
    if kind == "json_object":
        schema = inner.mapping("schema")  # llama.cpp's place for one
        yield GrammarSource("json_schema", _schema(schema, name) if schema else _ANY_OBJECT, name)
    elif kind == "json_schema":
        described = inner.nested("json_schema")
        for label in ("name", "description", "strict"):
            described.raw(label)  # the answer always follows the schema
        schema = described.raw("schema")
        if schema is None:
            raise InvalidRequest("response_format.json_schema needs a schema.", param=name)
        yield GrammarSource("json_schema", _schema(schema, name), name)
    elif kind == "structural_tag":
        yield from _source("structural_tag", {key: inner.raw(key) for key in ("structures", "triggers")}, name)
    elif kind not in ("text", None) or (kind is None and fields.raw(name)):
        raise InvalidRequest(
            f"response_format.type must be text, json_object, json_schema or structural_tag, not {shown(kind)}.",
            param=name,
        )


def _structured_outputs(fields: Fields) -> Iterator[GrammarSource]:
    name = "structured_outputs"
    inner = fields.nested(name)
    check_fields(inner, STRUCTURED_OUTPUTS)
    if inner.boolean("json_object", False):
        yield GrammarSource("json_schema", _ANY_OBJECT, name)
    for key, kind in _STRUCTURED_OUTPUTS.items():
        yield from _source(kind, inner.raw(key), name)


def _source(kind: GrammarKind, value: Any, field: str) -> Iterator[GrammarSource]:
    """Yields the source of a field, none if its value asks for nothing."""
    if value is None or value in ("", []) or (value == {} and field == "json_schema"):  # llama.cpp's default
        return
    if kind == "json_schema":
        yield GrammarSource(kind, _schema(value, field), field)
    elif kind == "choice":
        yield GrammarSource(kind, _choices(value, field), field)
    elif kind == "structural_tag":
        yield GrammarSource(kind, _tags(value, field), field)
    elif isinstance(value, str):
        yield GrammarSource(kind, value, field)
    else:
        raise InvalidRequest(f"{field} must be a string, not {shown(value)}.", param=field)


def _schema(value: Any, field: str) -> str:
    """A JSON schema, given as an object or as its text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON schema, not {shown(value)}.", param=field)
    return json_text(value, field)


def _choices(value: Any, field: str) -> str:
    if not isinstance(value, list) or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidRequest(f"{field} must be a list of strings, none of them empty.", param=field)
    if len(value) > _MAX_CHOICES:
        raise InvalidRequest(f"{field} has {len(value)} choices; {_MAX_CHOICES} are allowed.", param=field)
    return json_text(value, field)


def _tags(value: Any, field: str) -> str:
    """vLLM's structural tag, given as an object or as its text: after one of the `triggers`, the text goes on as one of
    the `structures` whose `begin` starts with it."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{field} is not valid JSON.", param=field) from None
    outer = Fields(value if isinstance(value, dict) else {})
    triggers, tags = outer.array("triggers", _MAX_TAGS), []
    for structure in outer.array("structures", _MAX_TAGS):
        tag = structure if isinstance(structure, dict) else {}
        begin, schema, end = tag.get("begin"), tag.get("schema", {}), tag.get("end", "")
        if not (isinstance(begin, str) and isinstance(schema, dict) and isinstance(end, str)):
            raise InvalidRequest(f"{field}: a structure has begin, schema and end.", param=field)
        trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
        if trigger is None:
            raise InvalidRequest(f"{field}: no trigger begins {shown(begin)}.", param=field)
        tags.append({"trigger": trigger, "begin": begin, "schema": schema, "end": end})
    if not tags:
        raise InvalidRequest(f"{field} needs a list of structures and one of triggers.", param=field)
    return json_text(tags, field)


def json_text(value: Any, field: str) -> str:
    """Returns a value as JSON. Raises InvalidRequest that names the field if it is nested too deeply or too long."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # orjson has no integers above 64 bits
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply.", param=field) from None
    except ValueError:
        raise InvalidRequest(f"{field} holds a number that is not finite.", param=field) from None
    if len(text) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{field} has {len(text)} characters; {MAX_SOURCE_BYTES} are allowed.", param=field)
    return text


# --- banned tokens ---


async def _with_banned_tokens(
    fields: Fields, engine: Engine, params: SamplingParams, grammar: Grammar | None
) -> Grammar | None:
    """Returns the grammar with the request's banned tokens. Raises InvalidRequest that names the field."""
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
