"""Least squares with no coefficient below zero, for the few measured points of a profile. standard library.

`profile.py` fits times with it. More work never takes less time: what comes out negative is noise, and a prediction
that falls as work grows would mislead whoever goes by it.
"""

import math
from collections.abc import Sequence


def fit_times(columns: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Coefficients c ≥ 0 with Σ c[i] · columns[i] ≈ values, and R². No column may have an element below zero: of
    columns that make up one another, all but the needed ones then come out with a coefficient of 0."""
    used = list(range(len(columns)))
    found = _least_squares(columns, values)
    while used and min(found) < 0:
        del used[found.index(min(found))]
        found = _least_squares([columns[index] for index in used], values)
    coefficients = [0.0] * len(columns)
    for index, coefficient in zip(used, found, strict=True):
        coefficients[index] = coefficient
    predicted = [sum(map(math.prod, zip(coefficients, row, strict=True))) for row in zip(*columns, strict=True)]
    return tuple(coefficients), r_squared(predicted, values)


def r_squared(predicted: Sequence[float], values: Sequence[float]) -> float:
    """The share of the values' variance that the prediction explains; 1 is all of it, or that there is none."""
    mean = math.fsum(values) / len(values)
    total = math.fsum((value - mean) ** 2 for value in values)
    left = math.fsum((value - guess) ** 2 for value, guess in zip(values, predicted, strict=True))
    return 1.0 - left / total if total else 1.0


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """By orthogonalising one column after another: keeps the digits that the normal equations would lose."""
    bases: list[list[float]] = []
    shares: list[list[float]] = []  # [column][base]
    for column in columns:
        rest, share = list(column), []
        for base in bases:
            part = _dot(base, rest)
            share.append(part)
            rest = [x - part * b for x, b in zip(rest, base, strict=True)]
        length = math.hypot(*rest)
        share.append(length)
        bases.append([x / length if length else 0.0 for x in rest])
        shares.append(share)
    rest, parts = list(values), []
    for base in bases:
        parts.append(_dot(base, rest))
        rest = [x - parts[-1] * b for x, b in zip(rest, base, strict=True)]
    found = [0.0] * len(columns)
    for index in reversed(range(len(columns))):
        known = sum(found[later] * shares[later][index] for later in range(index + 1, len(columns)))
        found[index] = (parts[index] - known) / shares[index][index] if shares[index][index] else 0.0
    return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(map(math.prod, zip(left, right, strict=True)))
