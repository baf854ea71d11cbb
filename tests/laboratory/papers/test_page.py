"""The page of the papers' figures, and the plots on it."""

import subprocess
from dataclasses import replace
from datetime import date
from pathlib import Path

from caraserve.bench.records import machine, versions
from scripts.laboratory.papers.figures import (
    SCHEMA,
    FigureData,
    FigureResult,
    Value,
    figure_panels,
    find_figures,
    save_result,
)
from scripts.laboratory.papers.page import gpu_section, papers_page

ROOT = Path(__file__).parents[3]


def result(number: str, *values: Value) -> FigureResult:
    data = FigureData("measured", ("Three repeats.",), values, ())
    return FigureResult(SCHEMA, "toppings", number, 0, data, machine(), versions())


def s3(mode: str, ratio: float) -> Value:
    return Value(f"toppings-s3 {mode} TTFT", ratio)


def test_values_that_no_paper_prints_are_folded_when_they_are_many(tmp_path: Path) -> None:
    others = [s3(f"mode {number}", 1.0 + number) for number in range(9)]
    save_result(tmp_path / "toppings-14-s3.json", result("14-s3", s3("ondemand", 2.5), *others))
    page = papers_page(tmp_path)
    shown, _, folded = page.partition(" other values</summary>")
    assert "| toppings-s3 ondemand TTFT | 1.820 | 2.500 |" in shown
    assert "mode 0" not in shown
    assert "| toppings-s3 mode 0 TTFT | – | 1.000 |" in folded


def test_a_figure_names_the_machine_the_day_and_the_commit_of_its_run(tmp_path: Path) -> None:
    made = replace(
        result("8", s3("auto", 1.0)),
        machine={"cpu": "EPYC", "cores": 2, "date": "2026-11-27"},
        versions={"caraserve": "0.2.0", "commit": "c5b5cb7"},
    )
    save_result(tmp_path / "toppings-8.json", made)
    assert "\nMeasured on EPYC, 2 cores, 2026-11-27, commit c5b5cb7.\n" in papers_page(tmp_path)


def test_every_result_has_the_day_and_in_a_repository_the_commit() -> None:
    assert date.fromisoformat(str(machine()["date"])) >= date(2026, 11, 27)
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert head.startswith(versions()["commit"].removesuffix("-dirty"))


def test_an_equal_result_is_shown_once(tmp_path: Path) -> None:
    for number in ("8", "14-s3"):
        save_result(tmp_path / f"toppings-{number}.json", result(number, s3("auto", 1.25)))
    page = papers_page(tmp_path)
    assert page.count("1.250") == 1
    assert "The result is that of [toppings-8](#toppings-8)." in page


def test_a_figure_whose_values_are_in_others_links_them(tmp_path: Path) -> None:
    row = next(line for line in papers_page(tmp_path).splitlines() if "| 1-right |" in line)
    assert row.endswith("| in [18](#toppings-18), [19](#toppings-19) |")


def test_ratios_of_the_paper_are_drawn_beside_ours() -> None:
    (figure,) = find_figures("toppings", "14-s3")
    (panel,) = figure_panels(figure, result("14-s3", s3("ondemand", 2.5), s3("auto", 1.1), s3("cached", 1.0)))
    assert [(series.label, series.y) for series in panel.series] == [("the paper", (1.82, 1.06)), ("here", (2.5, 1.1))]
    assert panel.categories == ("ondemand TTFT", "auto TTFT")


def test_what_a_gpu_has_shown_is_on_the_page_and_read_from_the_results(tmp_path: Path) -> None:
    section = "\n".join(gpu_section(ROOT / "scripts/bench/results/gpu_h200"))
    assert section in (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    assert "22.4 ms with all adapters on the device, 28.0 with `pipelined`, 31.9 with `ondemand` and 35.2" in section
    assert "Of 18 cold prompts that were measured alone, `assisted` was slower than `pipelined` in 17." in section
    assert "grows by 19 %" in section
    assert list(gpu_section(tmp_path)) == [], "without results"
