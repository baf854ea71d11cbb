"""What tests of serving need: a small model, adapters of all kinds, and the oracle."""

from pathlib import Path
from typing import NamedTuple

from tests.oracle.models import ALL_TARGETS, Kinds, make_adapters, make_model
from tests.oracle.oracle import Oracle

KINDS: Kinds = {
    "r8": {"rank": 8, "targets": ALL_TARGETS},
    "r13": {"rank": 13, "targets": ("q_proj", "k_proj", "v_proj"), "rslora": True},
    "r64": {"rank": 64, "targets": ALL_TARGETS, "dtype": "bfloat16"},
    "half": {"rank": 24, "targets": ALL_TARGETS, "dtype": "float16"},
    "mlp": {"rank": 5, "targets": ("gate_proj", "up_proj", "down_proj"), "layers": [1]},
    "dora": {"rank": 8, "targets": ("q_proj", "o_proj", "gate_proj", "down_proj"), "dora": True},
    "mixed": {"rank": 4, "targets": ("k_proj", "o_proj", "down_proj"), "rank_pattern": {"o_proj": 40}},
}


class Subject(NamedTuple):
    """A model with adapters and its oracle. `adapters` are named after their kinds."""

    model: Path
    adapters: dict[str, Path]
    oracle: Oracle


def make_subject(folder: Path, kinds: Kinds = KINDS, family: str = "llama3") -> Subject:
    model = make_model(folder / "model", family)
    adapters = make_adapters(folder, model, kinds)
    return Subject(model, adapters, Oracle(model, adapters))
