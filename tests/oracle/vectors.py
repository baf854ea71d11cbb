"""Vectors in place of prompt tokens, for tests that serve them."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from caraserve.core.request import PromptEmbeds
from caraserve.http.apis.prompt_embeds import digests_of
from caraserve.loop import Engine
from tests.serving import submit


def vectors_of_tokens(model: Path) -> NDArray[np.float32]:
    """Returns a model's own vectors of all tokens, [vocab, hidden]."""
    weights: NDArray[np.float32] = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    return weights.astype(np.float32)


def embeds_of(values: NDArray[np.float32]) -> PromptEmbeds:
    return PromptEmbeds(values, digests_of(values))


def with_vectors(
    prompt: Sequence[int], places: Sequence[int], vectors: NDArray[np.float32]
) -> tuple[list[int], PromptEmbeds]:
    """Returns a prompt whose tokens at `places` are replaced by their own vectors."""
    mixed = list(prompt)
    for number, place in enumerate(places):
        mixed[place] = -1 - number
    return mixed, embeds_of(vectors[[prompt[place] for place in places]])


async def are_freed_when_the_request_ends(engine: Engine, vectors: NDArray[np.float32]) -> bool:
    """Whether the vectors of an ended request are freed while the engine goes on with another slot's request."""
    embeds = embeds_of(vectors.copy())
    values = weakref.ref(embeds.values)
    ended = submit(engine, range(-1, -1 - len(vectors), -1), prompt_embeds=embeds, max_tokens=1)
    other = submit(engine, (5, 6, 7), max_tokens=12)
    del embeds
    await ended
    del ended
    await other
    gc.collect()
    return values() is None
