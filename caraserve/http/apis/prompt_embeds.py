"""Reads vectors that stand in a prompt in place of tokens: one safetensors tensor in base64, never a pickle."""

import asyncio
import binascii
import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.core.request import PromptEmbeds
from caraserve.errors import InvalidRequest
from caraserve.http.body.field_types import Fields, shown, token_ids
from caraserve.http.body.limits import check_context
from caraserve.loop import Engine
from caraserve.model.dtype import to_float32
from caraserve.model.opened_file import TensorFileError
from caraserve.model.safetensors_reader import TensorFile
from caraserve.util.tasks import in_turns, slices

_NAME = "prompt_embeds"
_PIECES_AT_ONCE = 1 << 16  # looked at within 1.5 ms
_SLICE_CHARACTERS = 1 << 20  # of base64, a multiple of 4: decoded within 3 ms, which hold the interpreter lock


def embeds_prompts(fields: Fields) -> list[list[Any]]:
    """Returns the prompts of `prompt_embeds`, each a list of one piece; none without it. Raises InvalidRequest."""
    value = fields.raw(_NAME)
    if value in (None, "", []):
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            f"{_NAME} must be a safetensors file in base64, or a list of such files, not {shown(value)}.", param=_NAME
        )
    if fields.raw("prompt") not in (None, "", []):
        raise InvalidRequest(
            f'{_NAME} are whole prompts; send prompt or {_NAME}, or put {{"{_NAME}": …}} between the token ids of '
            "prompt.",
            param=_NAME,
        )
    return [[{_NAME: text}] for text in texts]


async def has_embeds(prompt: object) -> bool:
    """Returns whether a prompt has pieces that are vectors."""
    if isinstance(prompt, list):
        async for some in in_turns(slices(prompt, _PIECES_AT_ONCE)):
            if dict in set(map(type, some)):
                return True
    return False


async def mixed_prompt(name: str, pieces: Sequence[Any], engine: Engine) -> tuple[tuple[int, ...], PromptEmbeds]:
    """Returns the tokens and vectors of a prompt whose pieces are token ids and `{"prompt_embeds": …}`. `name`: of the
    prompt in messages. Raises InvalidRequest, and ContextLengthExceeded."""
    ids: list[int] = []
    parts: list[NDArray[np.float32]] = []
    vectors = 0
    for is_embeds, run in groupby(pieces, lambda piece: isinstance(piece, dict)):
        if not is_embeds:
            ids += token_ids(name, list(run), engine.tokenizer.vocab_size)
            continue
        for piece in run:
            text = piece.get(_NAME)
            if len(piece) != 1 or not isinstance(text, str):
                raise InvalidRequest(
                    f'{name} may hold token ids and {{"{_NAME}": a safetensors file in base64}}.', param="prompt"
                )
            part = await asyncio.to_thread(_vectors, text, engine.embedding_size)
            parts.append(part)
            ids += range(-1 - vectors, -1 - vectors - len(part), -1)
            vectors += len(part)
            check_context(len(ids), engine.max_model_len)
    values = await asyncio.to_thread(np.concatenate, parts)
    return tuple(ids), PromptEmbeds(values, await asyncio.to_thread(digests_of, values))


def _vectors(text: str, hidden: int) -> NDArray[np.float32]:
    """Returns the vectors of a file, float32 [vectors, hidden]. Raises InvalidRequest."""
    with ExitStack() as stack:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        stack.callback(os.close, descriptor)
        try:
            for at in range(0, len(text), _SLICE_CHARACTERS):
                os.write(descriptor, binascii.a2b_base64(text[at : at + _SLICE_CHARACTERS], strict_mode=True))
        except ValueError as error:
            raise InvalidRequest(f"{_NAME} is not valid base64: {error}.", param=_NAME) from None
        try:
            file = stack.enter_context(TensorFile(Path(f"/proc/self/fd/{descriptor}"), _NAME))
            if len(file.names) != 1:
                raise TensorFileError(f"{_NAME} has {len(file.names)} tensors; one is needed")
            (tensor,) = file.names
            shape, dtype = file.shape(tensor), file.dtype(tensor)
            if len(shape) != 2 or shape[1] != hidden or not shape[0]:
                raise TensorFileError(
                    f"{_NAME} has a tensor of shape {list(shape)}; the model needs [tokens, {hidden}]"
                )
            values = to_float32(file.raw(tensor), dtype)
        except TensorFileError as error:
            raise InvalidRequest(f"{error}.", param=_NAME) from None
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{_NAME} has a number that is infinite or not a number.", param=_NAME)
    return values


def digests_of(values: NDArray[np.float32]) -> tuple[bytes, ...]:
    """Returns the digest of each vector."""
    return tuple(hashlib.blake2b(row.data, digest_size=16).digest() for row in values)
