"""Adapters that change the embedding and the head, for tied and untied bases, and their oracles."""

import random
from pathlib import Path
from typing import NamedTuple

from tests.oracle.models import ALL_TARGETS, Kinds, make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle

TOKENS = [5, 340, 7, 64, 128, 129]
KINDS: Kinds = {
    "plain": {"rank": 8, "targets": ALL_TARGETS},
    "head": {"rank": 5, "targets": ("q_proj", "lm_head"), "rank_pattern": {"lm_head": 12}},
    "embedding": {"rank": 4, "targets": ("v_proj", "embed_tokens"), "dtype": "bfloat16"},
    "both": {"rank": 16, "targets": ("embed_tokens", "lm_head"), "rslora": True, "dtype": "float16"},
    "rows": {"rank": 4, "targets": ("q_proj",), "tokens": TOKENS},
    "saved": {"rank": 4, "targets": ("q_proj",), "saved": {"lm_head": TOKENS[2:], "embed_tokens": TOKENS[:4]}},
    "saved-head": {"rank": 4, "targets": ("q_proj",), "saved": {"lm_head": TOKENS}},
    "saved-embedding": {"rank": 4, "targets": ("q_proj",), "saved": {"embed_tokens": TOKENS}},
}
UNTIED: Kinds = {
    "head-rows": {"rank": 4, "targets": ("q_proj", "embed_tokens"), "tokens": {"lm_head": TOKENS[:3]}},
    "two-tables": {"rank": 4, "targets": ("q_proj",), "tokens": {"lm_head": TOKENS[:3], "embed_tokens": TOKENS}},
}
# An untied base, a tied one, and a tied one whose embedding is scaled.
BASES = {"llama3": {**KINDS, **UNTIED}, "qwen2": KINDS, "gemma3": KINDS}


class VocabularySubject(NamedTuple):
    """A model with adapters, and an oracle for each of them and none: peft cannot wrap an embedding twice."""

    model: Path
    adapters: dict[str, Path]
    oracles: dict[str | None, Oracle]


def make_vocabulary_subject(folder: Path, family: str) -> VocabularySubject:
    model = make_model(folder / "model", family)
    adapters = make_adapters(folder, model, BASES[family])
    oracles = {name: Oracle(model, {name: path}) for name, path in adapters.items()}
    return VocabularySubject(model, adapters, {None: Oracle(model), **oracles})


def prompts_with_changed_tokens(count: int) -> list[list[int]]:
    """Returns prompts in which every fifth token is one whose row some adapters replace."""
    rng = random.Random(3)
    return [
        [rng.choice(TOKENS) if place % 5 == 2 else token for place, token in enumerate(prompt_of(rng, 37))]
        for _ in range(count)
    ]
