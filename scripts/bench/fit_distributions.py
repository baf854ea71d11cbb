"""Writes caraserve/bench/workload/distributions.json: quantiles and parameters fitted to published measurements.

    python scripts/bench/fit_distributions.py FOLDER

FOLDER has the files named in SOURCES: prompt_tokens and output_tokens by request (CSV, gzip-compressed), tables of
quantiles for data sets whose rows may not be published, and the calls per day of a sample of Azure Functions 2019. Only
quantiles, means and fitted parameters are written.
"""

import argparse
import csv
import gzip
import io
import json
from dataclasses import dataclass
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

AZURE = {
    "licence": "CC BY 4.0",
    "attribution": "Azure Public Dataset (Microsoft); Patel et al., Splitwise, ISCA 2024",
    "derived": "quantiles of the tokens of all requests",
}
MOONCAKE = {
    "licence": "Apache-2.0",
    "attribution": "kvcache-ai/Mooncake; Qin et al., Mooncake, FAST 2025",
    "derived": "quantiles of the tokens of all requests",
}
ETALON = {
    "licence": "Apache-2.0",
    "attribution": "project-etalon/etalon",
    "derived": "quantiles of all rows; Llama 2 tokens",
}


@dataclass(frozen=True)
class Source:
    """One file of measurements. If it has only quantiles, `means` and `correlation` give the other measured values."""

    file: str
    about: dict[str, str]
    means: tuple[float, float] | None = None
    correlation: float | None = None
    count: int | None = None


SOURCES = {
    "lmsys": Source(
        "lmsys_quantiles.csv",
        {
            "source": "1,024 requests of LMSYS-Chat-1M (microsoft/apex_plus, traces/llama/lmsys_05.jsonl)",
            "licence": "the data set's agreement forbids passing on its rows: summary statistics only",
            "attribution": "Zheng et al., LMSYS-Chat-1M, 2023",
            "derived": "quantiles of one prompt and one answer each; Llama tokens; correlation of the logarithms",
        },
        (61.7, 162.1),
        0.10,
        1_024,
    ),
    "alpaca": Source(
        "alpaca_quantiles.csv",
        {
            "source": "tatsu-lab/stanford_alpaca, counted in casys-kaist/NeuPIMs (trace-generator/alpaca/stats.tsv)",
            "licence": "CC BY-NC 4.0, and no licence stated for the counts: summary statistics only",
            "attribution": "Taori et al., Stanford Alpaca, 2023",
            "derived": "quantiles; the instruction alone, without input or template; tokens of the first GPT, "
            "somewhat fewer than Llama's; correlation of the logarithms",
        },
        (12.1, 55.8),
        -0.07,
        52_002,
    ),
    "sharegpt": Source(
        "sharegpt_8k_lengths.csv.gz",
        {"source": "ShareGPT up to 8k tokens (sharegpt_8k_filtered_stats_llama2_tokenizer.csv)"}
        | ETALON
        | {"derived": "quantiles of all rows; Llama 2 tokens; a prompt includes the turns before it"},
    ),
    "azure-conv": Source(
        "azure_llm_2023_conv.csv.gz", {"source": "Azure LLM inference trace 2023, conversation"} | AZURE
    ),
    "azure-code": Source("azure_llm_2023_code.csv.gz", {"source": "Azure LLM inference trace 2023, code"} | AZURE),
    "qmsum": Source(
        "qmsum_lengths.csv.gz",
        {
            "source": "QMSum, all three splits",
            "licence": "MIT",
            "attribution": "Yale-LILY/QMSum; Zhong et al., QMSum, NAACL 2021",
            "derived": "quantiles; the prompt is the whole meeting and the query; Llama 2 tokens",
        },
    ),
    "arxiv": Source(
        "arxiv_summarization_lengths.csv.gz",
        {
            "source": "arXiv summarisation (arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv)",
            "licence": "MIT",
            "attribution": "microsoft/vidur",
            "derived": "quantiles of all rows; Llama 2 tokens, at most 4,096 a row",
        },
    ),
    "bwb": Source(
        "bwb_lengths.csv.gz",
        {"source": "BWB, translation of books (bwb_stats_llama2_tokenizer_filtered_v2.csv)"} | ETALON,
    ),
    "mooncake-conversation": Source(
        "mooncake_conversation.csv.gz", {"source": "Mooncake trace, conversation_trace.jsonl"} | MOONCAKE
    ),
    "mooncake-synthetic": Source(
        "mooncake_synthetic.csv.gz", {"source": "Mooncake trace, synthetic_trace.jsonl"} | MOONCAKE
    ),
}

FUNCTIONS = "maf2019_popularity.csv"
FUNCTIONS_ABOUT = {
    "source": "1,250 of the functions of Azure Functions 2019, one day (vhive-serverless/invitro, 1250_inv.csv)",
    "licence": "sample MIT, trace CC BY 4.0",
    "attribution": "Azure Public Dataset (Microsoft); Shahrad et al., Serverless in the Wild, ATC 2020",
    "derived": "mean and standard deviation of the logarithm of each function's calls a day, and the most of any",
}

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


def fit(folder: Path, source: Source) -> dict[str, Any]:
    """Returns quantiles and means of both lengths, and the correlation of the Gaussian copula between them."""
    path = folder / source.file
    if source.means is None:
        prompts, outputs = read_columns(path, "prompt_tokens", "output_tokens")
        count = len(prompts)
        knots = [np.percentile(tokens, LEVELS) for tokens in (prompts, outputs)]
        means = (round(float(prompts.mean()), 1), round(float(outputs.mean()), 1))
        # Spearman's coefficient, then the correlation of a normal distribution that has this coefficient.
        correlation = 2 * sin(pi / 6 * float(np.corrcoef(places(prompts), places(outputs))[0, 1]))
    else:
        assert source.correlation is not None
        assert source.count is not None
        percent, *columns = read_columns(path, "percentile", "prompt_tokens", "output_tokens")
        knots = [np.interp(LEVELS, percent, column) for column in columns]
        means, correlation, count = source.means, source.correlation, source.count
    return source.about | {
        "requests": count,
        "correlation": round(correlation, 3),
        "prompt_tokens": {"mean": means[0], "knots": [round(float(knot), 1) for knot in knots[0]]},
        "output_tokens": {"mean": means[1], "knots": [round(float(knot), 1) for knot in knots[1]]},
    }


def fit_functions(folder: Path) -> dict[str, Any]:
    """Fits a log-normal distribution of calls per day, with the calls of the trace's busiest function as its limit."""
    (calls,) = read_columns(folder / FUNCTIONS, "invocations_per_day")
    logs = np.log(calls)
    return FUNCTIONS_ABOUT | {
        "functions": len(calls),
        "mu": round(float(logs.mean()), 3),
        "sigma": round(float(logs.std()), 3),
        "most": int(calls.max()),
    }


def main() -> None:
    """Fits all distributions and writes the file."""
    parser = argparse.ArgumentParser(description="Fits the length and popularity distributions of caraserve bench.")
    parser.add_argument("folder", type=Path, help="folder with the files of measurements")
    folder = parser.parse_args().folder
    document = {
        "levels": LEVELS,
        "lengths": {name: fit(folder, source) for name, source in SOURCES.items()},
        "popularity": {"maf": fit_functions(folder)},
    }
    text = json.dumps(document, indent=1, ensure_ascii=False)
    # One list per line, so that a changed fit changes few lines.
    head, *rest = text.split("[")
    lists = (numbers.split("]", 1) for numbers in rest)
    joined = "[".join([head, *(" ".join(numbers.split()) + "]" + after for numbers, after in lists)])
    OUTPUT.write_text(joined + "\n", encoding="utf-8")
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
