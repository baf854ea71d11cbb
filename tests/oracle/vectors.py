"""Vectors in place of prompt tokens, for tests that serve them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from caraserve.core.request import PromptEmbeds
from caraserve.http.apis.prompt_embeds import digests_of


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
