"""What was fitted to published measurements; scripts/bench/fit_distributions.py writes it."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def distributions() -> dict[str, Any]:
    """The fitted parameters and where they come from: `levels`, `lengths` by name, `popularity` by name."""
    source = files("caraserve.bench.workload").joinpath("distributions.json")
    document: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return document
