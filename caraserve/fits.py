"""Least squares with no coefficient below zero, for the few measured points of a profile. Level 0: standard library.

`profile.py` fits times with it. More work never takes less time: what comes out negative is noise, and a prediction
that falls as work grows would mislead whoever goes by it.
"""

import math
from collections.abc import Sequence

_INDEPENDENT = 1e-9  # what must be left of a column, relative to its length, for it to say something of its own


def fit_times(columns: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Coefficients c ≥ 0 with Σ c[i] · columns[i] ≈ values, and R². A column that others make up gets 0."""
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
    """The share of the values' variance that the prediction explains; 1 is all of it."""
    mean = math.fsum(values) / len(values)
    total = math.fsum((value - mean) ** 2 for value in values)
    left = math.fsum((value - guess) ** 2 for value, guess in zip(values, predicted, strict=True))
    if total == 0.0:
        return 1.0 if left == 0.0 else 0.0
    return 1.0 - left / total


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
        length, enough = math.hypot(*rest), _INDEPENDENT * math.hypot(*column)
        share.append(length if length > enough else 0.0)
        bases.append([x / length for x in rest] if length > enough else [0.0] * len(rest))
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
