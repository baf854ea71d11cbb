"""Fits the distributions in caraserve/bench/workload/distributions.json to published measurements again.

    python scripts/bench/fit_distributions.py FOLDER

FOLDER has the files named in LENGTHS: prompt_tokens and output_tokens by request (CSV, gzip-compressed), or tables of
quantiles for data sets whose rows may not be published; and the calls per day of a sample of Azure Functions 2019. Only
quantiles, means and fitted parameters are written; sources and licences in the file stay, and so do the means,
correlation and count of data sets of which only quantiles are at hand.
"""

import argparse
import csv
import gzip
import io
import json
from math import pi, sin
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTPUT = Path(__file__).parents[2] / "caraserve/bench/workload/distributions.json"

# In percent; closest where the tails are, because a straight line across a long tail would move the mean.
LEVELS = (
    *(0, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90),
    *(92, 94, 95, 96, 97, 98, 98.5, 99, 99.25, 99.5, 99.7, 99.8, 99.9, 99.95, 99.98, 99.99, 100),
)
LENGTHS = {
    "lmsys": "lmsys_quantiles.csv",
    "alpaca": "alpaca_quantiles.csv",
    "sharegpt": "sharegpt_8k_lengths.csv.gz",
    "azure-conv": "azure_llm_2023_conv.csv.gz",
    "azure-code": "azure_llm_2023_code.csv.gz",
    "qmsum": "qmsum_lengths.csv.gz",
    "arxiv": "arxiv_summarization_lengths.csv.gz",
    "bwb": "bwb_lengths.csv.gz",
    "mooncake-conversation": "mooncake_conversation.csv.gz",
    "mooncake-synthetic": "mooncake_synthetic.csv.gz",
}
FUNCTIONS = "maf2019_popularity.csv"

Floats = NDArray[np.float64]


def read_columns(path: Path, *columns: str) -> list[Floats]:
    """Reads columns of a CSV file as float arrays."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))
    return [np.array([float(row[column]) for row in rows]) for column in columns]


def places(values: Floats) -> Floats:
    """Returns each value's rank in ascending order, from 1; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


def fit(path: Path, entry: dict[str, Any]) -> None:
    """Sets quantiles and means of both lengths, and the correlation of the Gaussian copula between them."""
    if "quantiles" in path.name:
        percent, *columns = read_columns(path, "percentile", "prompt_tokens", "output_tokens")
        knots = [np.interp(LEVELS, percent, column) for column in columns]
    else:
        prompts, outputs = read_columns(path, "prompt_tokens", "output_tokens")
        knots = [np.percentile(tokens, LEVELS) for tokens in (prompts, outputs)]
        entry["requests"] = len(prompts)
        # Spearman's coefficient, then the correlation of a normal distribution that has this coefficient.
        spearman = float(np.corrcoef(places(prompts), places(outputs))[0, 1])
        entry["correlation"] = round(2 * sin(pi / 6 * spearman), 3)
        entry["prompt_tokens"]["mean"] = round(float(prompts.mean()), 1)
        entry["output_tokens"]["mean"] = round(float(outputs.mean()), 1)
    for name, values in zip(("prompt_tokens", "output_tokens"), knots, strict=True):
        entry[name]["knots"] = [round(float(knot), 1) for knot in values]


def fit_functions(path: Path, entry: dict[str, Any]) -> None:
    """Fits a log-normal distribution of calls per day, with the calls of the trace's busiest function as its limit."""
    (calls,) = read_columns(path, "invocations_per_day")
    logs = np.log(calls)
    entry |= {"functions": len(calls), "mu": round(float(logs.mean()), 3), "sigma": round(float(logs.std()), 3)}
    entry["most"] = int(calls.max())


def main() -> None:
    """Fits all distributions and writes the file."""
    parser = argparse.ArgumentParser(description="Fits the length and popularity distributions of caraserve bench.")
    parser.add_argument("folder", type=Path, help="folder with the files of measurements")
    folder = parser.parse_args().folder
    document = json.loads(OUTPUT.read_text(encoding="utf-8")) | {"levels": LEVELS}
    for name, file in LENGTHS.items():
        fit(folder / file, document["lengths"][name])
    fit_functions(folder / FUNCTIONS, document["popularity"]["maf"])
    text = json.dumps(document, indent=1, ensure_ascii=False)
    # One list per line, so that a changed fit changes few lines.
    head, *rest = text.split("[")
    lists = (numbers.split("]", 1) for numbers in rest)
    joined = "[".join([head, *(" ".join(numbers.split()) + "]" + after for numbers, after in lists)])
    OUTPUT.write_text(joined + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
