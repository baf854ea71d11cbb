"""Saved reports: documents and CSV are read back, figures are drawn, two reports are compared."""

import csv
import json
from pathlib import Path

import pytest

from caraserve.bench.records import RequestRecord, Run
from caraserve.bench.report.files import compare, document, load_saved, save_report
from caraserve.bench.report.plots import can_draw
from caraserve.bench.report.run_plots import run_plots
from caraserve.bench.report.summary import SloLimits, summarize
from caraserve.errors import ConfigError


def run(label: str, ttft_s: float, model: str = "poet", requests: int = 12) -> Run:
    records = tuple(
        RequestRecord(
            index=index,
            model=model,
            rank=(8, 64)[index % 2],
            due_s=float(index),
            sent_s=float(index),
            done_s=index + ttft_s + 0.2,
            prompt_tokens=10,
            output_tokens=3,
            token_s=(index + ttft_s, index + ttft_s + 0.1, index + ttft_s + 0.2),
            phases=(("queued", 1.0), ("load", 2.5)),
        )
        for index in range(requests)
    )
    return Run(label, records, float(requests))


def saved(folder: Path, *runs: Run, arguments: dict[str, object] | None = None) -> Path:
    summaries = [summarize(each, SloLimits(ttft_ms=250)) for each in runs]
    report = document("serve", summaries, {"seed": 3, **(arguments or {})}, ["a note"])
    folder.mkdir(exist_ok=True)
    save_report(folder, report, runs, run_plots(runs, summaries))
    return folder


def test_a_saved_document_is_read_back_unchanged(tmp_path: Path) -> None:
    runs = run("cached", 0.1), Run("none", (), 0.0, interrupted=True)
    report = load_saved(saved(tmp_path, *runs) / "serve.json")
    assert report.runs == tuple(summarize(each, SloLimits(ttft_ms=250)) for each in runs)
    assert (report.runs[1].sent, report.runs[1].interrupted) == (0, True)
    assert report.notes == ("a note",)
    assert report.arguments["seed"] == 3


def test_every_request_has_a_csv_row(tmp_path: Path) -> None:
    rows = list(
        csv.DictReader((saved(tmp_path, run("a", 0.1), run("b", 0.3)) / "requests.csv").read_text().splitlines())
    )
    assert len(rows) == 24
    assert rows[12]["run"] == "1:b"
    assert float(rows[12]["first_token_s"]) == pytest.approx(0.3)
    assert (rows[0]["phase_queued"], rows[0]["phase_load"]) == ("1.0", "2.5")


def test_figures_are_drawn_if_matplotlib_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (run("a", 0.1), run("b", 0.3))
    drawn = {path.name for path in saved(tmp_path / "with", *runs).glob("*.png")}
    assert drawn == ({"ratios.png", "cdfs.png", "time.png", "ranks.png"} if can_draw() else set())
    monkeypatch.setattr("caraserve.bench.report.run_plots.can_draw", lambda: False)
    assert list(saved(tmp_path / "without", *runs).glob("*.png")) == []


def test_two_reports_are_compared_figure_by_figure(tmp_path: Path) -> None:
    a = load_saved(saved(tmp_path / "a", run("x", 0.1), arguments={"request_rate": 1}) / "serve.json")
    b = load_saved(saved(tmp_path / "b", run("x", 0.2), arguments={"request_rate": 2}) / "serve.json")
    comparison = compare(a, b)
    ratios = {row.name: row.ratio for row in comparison.rows["x"]}
    assert ratios["TTFT mean, ms"] == pytest.approx(2)
    assert ratios["TPOT mean, ms"] == pytest.approx(1)
    assert ratios["SLO attainment"] == pytest.approx(1)
    assert comparison.differences == (("arguments: request_rate", "1", "2"),)


def test_a_report_made_before_interruptions_were_measured_is_still_read(tmp_path: Path) -> None:
    file = saved(tmp_path, run("x", 0.1)) / "serve.json"
    report = json.loads(file.read_text())
    del report["runs"][0]["interrupted_share"]
    file.write_text(json.dumps(report))
    assert load_saved(file).runs[0].interrupted_share is None


def test_without_a_common_label_only_reports_of_one_run_each_are_compared(tmp_path: Path) -> None:
    a, b, both = (
        load_saved(saved(tmp_path / "-".join(names), *(run(name, 0.1) for name in names)) / "serve.json")
        for names in (("ours",), ("theirs",), ("x", "y"))
    )
    assert list(compare(a, b).rows) == ["ours | theirs"]
    with pytest.raises(ConfigError, match="no run of x, y"):
        compare(both, b)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda report: "nonsense", "not JSON"),
        (lambda report: json.dumps({"bench": "lora"}), "no report"),
        (lambda report: json.dumps({**report, "runs": [{}]}), "no whole report"),
        (lambda report: json.dumps({**report, "runs": [{**report["runs"][0], "sent": "many"}]}), r"runs\[0\].sent"),
    ],
    ids=["text", "another document", "a run without figures", "a figure that is none"],
)
def test_files_that_are_no_reports_are_refused(tmp_path: Path, change: object, complaint: str) -> None:
    file = saved(tmp_path, run("x", 0.1)) / "serve.json"
    assert callable(change)
    file.write_text(change(json.loads(file.read_text())))
    with pytest.raises(ConfigError, match=complaint):
        load_saved(file)
