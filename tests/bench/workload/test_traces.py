"""Tests of trace readers: published formats and their reduced forms; errors name the line and the column."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from caraserve.bench.workload.forms import distributions
from caraserve.bench.workload.traces import RateTrace, RequestTrace, Trace, parse_trace, read_lengths
from caraserve.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MAF = """HashOwner,HashApp,HashFunction,Trigger,1,2,3
a,b,c,http,0,5,1
a,b,d,timer,0,0,0
e,f,g,queue,2,0,0
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def requests(trace: Trace) -> list[tuple[float, int, int]]:
    assert isinstance(trace, RequestTrace)
    at_s = np.zeros(len(trace.prompt_tokens)) if trace.at_s is None else trace.at_s.round(6)
    return list(zip(at_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def calls(trace: Trace) -> list[list[int]]:
    assert isinstance(trace, RateTrace)
    rows: list[list[int]] = trace.calls.tolist()
    return rows


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_trace(text)
    message = caught.value.message
    del caught  # in a cycle with its traceback, which keeps the file open until a garbage collection
    return message


def test_azures_own_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "conv.csv", AZURE)
    assert requests(parse_trace(f"azure-llm:{path}")) == [(0, 374, 44), (4.314579, 396, 109), (4.541877, 879, 55)]


def test_azures_later_release_has_a_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01+00:00,5,6\n2024-05-10 02:00:00+02:00,7,8\n"
    path = write(tmp_path, "code.csv", text)
    assert requests(parse_trace(f"azure-llm:{path}")) == [(0, 7, 8), (1, 5, 6)]  # by arrival


@pytest.mark.parametrize("name", ["conv.csv", "conv.csv.gz"])
@pytest.mark.parametrize("form", ["azure-llm", "mooncake"])
def test_the_reduced_form_plain_or_compressed(tmp_path: Path, form: str, name: str) -> None:
    path = write(tmp_path, name, "arrival_s,prompt_tokens,output_tokens,more\n2.5,10,1,x\n4,20,2,y\n")
    assert requests(parse_trace(f"{form}:{path}")) == [(0, 10, 1), (1.5, 20, 2)]


def test_a_column_of_adapters_is_numbered_as_they_occur(tmp_path: Path) -> None:
    text = "arrival_s,adapter,prompt_tokens,output_tokens\n0,sql,1,1\n1,poet,1,1\n2,sql,1,1\n"
    trace = parse_trace(f"azure-llm:{write(tmp_path, 't.csv', text)}")
    assert isinstance(trace, RequestTrace)
    assert trace.adapters is not None
    assert trace.adapters.tolist() == [0, 1, 0]


def test_mooncakes_own_lines(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": []},
    ]
    path = write(tmp_path, "conversation_trace.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert requests(parse_trace(f"mooncake:{path}")) == [(0, 6955, 52), (3.053, 6472, 26)]


def test_functions_by_the_minute_without_those_never_called(tmp_path: Path) -> None:
    assert calls(parse_trace(f"maf2019:{write(tmp_path, 'day.csv', MAF)}")) == [[0, 5, 1], [2, 0, 0]]
    reduced = write(tmp_path, "minutes.csv.gz", "function,m0,m1\n1,9,8\n2,0,1\n")
    assert calls(parse_trace(f"maf2019:{reduced}")) == [[9, 8], [0, 1]]


def test_a_sample_of_azure_functions_is_in_a_checkout_and_says_where_it_is_from() -> None:
    trace = parse_trace("maf2019")
    assert isinstance(trace, RateTrace)
    assert trace.calls.shape == (1250, 1440)
    by_function = trace.calls.sum(axis=1, dtype=np.int64)
    assert by_function.tolist() == sorted(by_function.tolist(), reverse=True)
    assert by_function.sum() / (24 * 3600) == pytest.approx(211.6, abs=0.1)
    entry = distributions()["traces"]["maf2019"]
    assert all(entry[field] for field in ("source", "licence", "attribution", "derived"))


def test_lengths_of_any_file_that_has_them(tmp_path: Path) -> None:
    plain = write(tmp_path, "l.csv.gz", "\ufeffsplit,prompt_tokens,output_tokens\ntest,3,4\n")
    assert requests(parse_trace(f"lengths:{plain}")) == [(0, 3, 4)]
    assert requests(read_lengths(plain)) == [(0, 3, 4)]
    assert requests(read_lengths(write(tmp_path, "a.csv", AZURE)))[0][1:] == (374, 44)
    line = '{"timestamp": 0, "input_length": 5, "output_length": 6}'
    assert requests(read_lengths(write(tmp_path, "m.jsonl.gz", line))) == [(0, 5, 6)]


def test_a_group_is_drawn_from_the_functions_without_repeats() -> None:
    trace = RateTrace("m.csv", np.arange(1, 101, dtype=np.int32).reshape(100, 1))
    group = trace.group(np.random.default_rng(0), 30)
    assert len(set(group.calls[:, 0].tolist())) == 30
    assert trace.group(np.random.default_rng(0), 100) is trace


@pytest.mark.parametrize(
    ("form", "text", "where"),
    [
        ("azure-llm", AZURE.replace("396", "39.6"), "line 3, column 'ContextTokens': '39.6' is not a whole number"),
        ("azure-llm", AZURE.replace("396", "-1"), "line 3, column 'ContextTokens': '-1' is not a whole number"),
        ("azure-llm", AZURE.replace("109", "9" * 30), "line 3, column 'GeneratedTokens': '9999"),
        ("azure-llm", AZURE.replace(",55", ""), "line 4, column 'GeneratedTokens': is missing; the row ends before"),
        ("azure-llm", AZURE.replace("55", "55,1"), "line 4: 4 cells, but the header names 3"),
        ("azure-llm", AZURE.replace("2023-11-16 18:15:50", "soon"), "line 3, column 'TIMESTAMP': 'soon.995169"),
        ("azure-llm", "a,b\n1,2\n", "line 1, column 'arrival_s': is missing; the header has a, b"),
        ("azure-llm", "TIMESTAMP,b\n1,2\n", "line 1, column 'ContextTokens': is missing"),
        ("azure-llm", "", "the file is empty"),
        ("azure-llm", AZURE.splitlines()[0], "has no requests"),
        ("mooncake", "arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "line 2, column 'arrival_s': 'nan' is not"),
        ("lengths", "prompt_tokens\n1\n", "column 'output_tokens': is missing"),
        ("maf2019", "function,m0\n1,2\n2,x\n", "line 3, column 'm0': 'x' is not a whole number"),
        ("maf2019", "function,m0\n1,2\n2,-2\n", "line 3, column 'm0': '-2' is not a whole number"),
        ("maf2019", "function,m0\n1,999999999\n", "line 2, column 'm0': '999999999' is not a whole number from 0 to 1"),
        ("maf2019", "function,m0,m1\n1,2\n", "line 2, column 'm1': is missing"),
        ("maf2019", "function,m0,count\n1,2,2\n", "line 1: the last columns must be minutes"),
        ("maf2019", "function,m0\n1,0\n", "has no function with a call"),
        ("lengths", "prompt_tokens,output_tokens\n\xff,1", "column 'prompt_tokens': 'ÿ' is not a whole number"),
    ],
)
def test_a_mistake_is_named_by_file_line_and_column(tmp_path: Path, form: str, text: str, where: str) -> None:
    path = write(tmp_path, "t.csv", text)
    message = refused(f"{form}:{path}")
    assert message.startswith(str(path))
    assert where in message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{", "line 1: not valid JSON"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ("[1]", "line 1: not a JSON object"),
        ('{"timestamp": 0, "input_length": 1}', "line 1, column 'output_length': is missing"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "column 'input_length': True is not"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1}', "column 'input_length': 1.5 is not"),
        ('{"timestamp": [0], "input_length": 1, "output_length": 1}', r"column 'timestamp': [0] is not a finite"),
        ('{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "column 'timestamp': inf is not a finite"),
    ],
)
def test_a_mistake_in_json_lines_is_named(tmp_path: Path, text: str, where: str) -> None:
    assert where in refused(f"mooncake:{write(tmp_path, 't.jsonl', text)}")


def test_bytes_that_are_no_table_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(gzip.compress(AZURE.encode())[:-20])
    assert "cannot be read" in refused(f"azure-llm:{broken}")
    broken.write_bytes(b"PK\x03\x04 not gzip")
    assert "cannot be read" in refused(f"azure-llm:{broken}")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"prompt_tokens,output_tokens\n\xff\xfe,1\n")
    assert "line 2: not UTF-8 text" in refused(f"lengths:{binary}")
    assert "there is no such file" in refused(f"azure-llm:{tmp_path}")


def test_an_unknown_format_is_refused_with_those_that_exist() -> None:
    forms = "azure-llm:PATH, mooncake:PATH, maf2019[:PATH], lengths:PATH"
    assert refused("burstgpt:x.csv") == f"trace 'burstgpt:x.csv' is not known; there are {forms}"
    assert refused("mooncake") == "trace 'mooncake': write mooncake:PATH"
