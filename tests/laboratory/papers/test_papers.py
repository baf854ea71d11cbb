"""Figures of the papers: the catalog, results, the command and the page that shows them."""

import json
from pathlib import Path

import pytest

from caraserve.bench.modes import ModesOptions
from caraserve.bench.options import LoadOptions
from caraserve.bench.records import RequestRecord, Run, machine, versions
from caraserve.bench.serve import Measurements
from caraserve.bench.workload.presets import find_preset
from caraserve.cli.main import main
from caraserve.errors import ConfigError
from scripts.laboratory.gpu.handover import HandOverFigures, HandOverPoint
from scripts.laboratory.papers import kernels, servers
from scripts.laboratory.papers.command import measurement, run_figure, value_rows
from scripts.laboratory.papers.fetches import DISK, MEMORY, PEER, by_rank, figure_data
from scripts.laboratory.papers.figures import (
    SCHEMA,
    FigureData,
    FigureResult,
    PaperOptions,
    Value,
    find_figures,
    load_figures,
    load_result,
    save_result,
)
from scripts.laboratory.papers.page import papers_page
from scripts.laboratory.papers.servers import load_share

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "scripts/bench/results/papers"
SHORT = PaperOptions(duration_s=1.0, repeats=1, seed=0)


def result_of(paper: str, number: str) -> FigureResult:
    (figure,) = find_figures(paper, number)
    return run_figure(figure, SHORT)


def test_every_figure_has_a_measurement_that_exists_or_says_why_not() -> None:
    keys = [figure.key for figure in load_figures()]
    assert len(keys) == len(set(keys))
    for figure in load_figures():
        assert figure.measure or figure.needs or figure.within, figure.key
        find_figures(figure.paper, ",".join(figure.within) or figure.number)
        if figure.measure is not None:
            assert callable(measurement(figure))
        for preset in filter(None, ",".join(figure.options.get(key, "") for key in ("preset", "presets")).split(",")):
            find_preset(preset)


def test_figures_show_modes_that_run_and_figures_of_one_setting_share_runs() -> None:
    modes: dict[tuple[str, str, bool], set[str]] = {}
    for figure in load_figures():
        options = figure.options
        if "modes" in options:
            assert set(options.get("shown", options["modes"]).split(",")) <= set(options["modes"].split(",")), (
                figure.key
            )
            setting = options.get("preset", options.get("presets", figure.key))
            words = (setting, options.get("arguments", ""), figure.measure == "servers:quarter_of_workers")
            modes.setdefault(words, set()).add(options["modes"])
    assert [setting for setting, found in modes.items() if len(found) > 1] == []


def test_figures_of_one_setting_are_measured_once_and_repeats_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    served: list[tuple[str, ...]] = []

    async def measured(options: ModesOptions, load: LoadOptions, report: object) -> Measurements:
        calls.append([str(load.preset), *options.modes])
        served.append(options.serve)
        records = (RequestRecord(0, "a", 8, 0.0, 0.0, 1.0, 4, 2, token_s=(0.5, 1.0)),)
        return Measurements([Run(mode, records, 1.0) for mode in options.modes * options.repeats], None, [])

    monkeypatch.setattr(servers, "bench_modes", measured)
    monkeypatch.setattr(servers.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    _, iterations = find_figures("caraserve", "10,11")
    for _ in range(2):
        panels = run_figure(iterations, SHORT).data.panels
        assert [line.label for line in panels[0].series] == ["cached", "ondemand", "auto"]
    assert calls == [["caraserve-syn-9-r64", "cached", "ondemand", "assisted", "auto"]]
    assert served == [("--cpu-threads", "2", "--lora-cpus", "2,3")], "half of the cores stand for the GPU"
    for _ in range(2):
        servers.run_modes(["--modes", "cached"], SHORT)
    assert len(calls) == 3


def test_a_figure_of_a_paper_is_found_by_its_number_and_all_are_those_that_can_be_run() -> None:
    assert [figure.title for figure in find_figures("toppings", "6")] == ["Routing one request by rank"]
    assert all(figure.measure for figure in find_figures("loraserve", "all"))
    assert "10" not in [figure.number for figure in find_figures("toppings", "all")], "it needs a GPU"
    with pytest.raises(ConfigError, match=r"'99' is not known; there are 1-left, "):
        find_figures("toppings", "99")
    assert [figure.number for figure in find_figures("toppings", "8, 15,8")] == ["8", "15"]


@pytest.mark.parametrize(("paper", "figures"), [("toppings", "6,10"), ("caraserve", "5,16")])
def test_figures_that_have_run_are_reported_when_a_later_one_fails(
    paper: str, figures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hand-overs are measured only on a GPU."""
    monkeypatch.setattr(kernels, "look", lambda: (None, ""))
    assert main(["bench", "paper", paper, "--figure", figures, "--save", str(tmp_path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert [figure["number"] for figure in json.loads(out.splitlines()[-1])["figures"]] == figures.split(",")[:1]
    assert err == "caraserve: this figure needs a GPU: there is no NVIDIA driver on this machine\n"


def test_the_routing_example_sends_the_request_where_the_paper_does() -> None:
    (figure,) = find_figures("toppings", "6")
    rows = {what: (theirs, ours) for what, theirs, ours in value_rows(figure, run_figure(figure, SHORT))}
    assert rows == {"padded: instance chosen": ("2.000", "2.000"), "unpadded: instance chosen": ("1.000", "1.000")}


def test_the_link_is_as_busy_as_in_the_paper() -> None:
    assert load_share("toppings-s3") == pytest.approx(9 * 0.030)
    assert load_share("toppings-s1") == pytest.approx(9 * 0.030 / 2), "half the rank loads in half the time"


def test_a_result_is_read_as_it_was_saved_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    result = result_of("caraserve", "5")
    save_result(tmp_path / "a.json", result)
    assert load_result(tmp_path / "a.json") == result
    (tmp_path / "b.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigError, match="is no result"):
        load_result(tmp_path / "b.json")


def test_the_command_saves_a_figure_and_prints_it_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", "loraserve", "--figure", "16", "--save", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "LoRAServe, figure 16" in printed
    assert json.loads(printed.splitlines()[-1])["figures"][0]["number"] == "16"
    data = load_result(tmp_path / "loraserve-16.json").data
    assert data.how == "simulated"
    start, _, end = next(panel.series for panel in data.panels if panel.title == "shifting-skew")
    assert start.y[-1] == pytest.approx(0.5, abs=0.05) == end.y[0], "from the largest rank to the smallest"


@pytest.mark.parametrize(
    ("paper", "number", "complaint"),
    [
        ("loraserve", "7", "it needs a trace"),
        ("loraserve", "0", "is not known"),
        ("toppings", "1-right", "has the values of others: --figure 18,19"),
    ],
    ids=["needs", "unknown", "within others"],
)
def test_figures_that_cannot_be_run_are_refused_with_the_reason(
    paper: str, number: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "paper", paper, "--figure", number]) == 2
    assert complaint in capsys.readouterr().err


def test_the_page_shows_the_saved_results() -> None:
    assert (ROOT / "docs/papers.md").read_text(encoding="utf-8") == papers_page(RESULTS), (
        "run `python -m scripts.bench.papers_page`"
    )


def test_a_figure_of_several_presets_lists_what_each_had_and_says_once_what_all_had(tmp_path: Path) -> None:
    shared, own = "Lengths are Alpaca's.", "Loads take 1 ms."
    presets = ("toppings-maf-128", "toppings-maf-256")
    sentences = [f"{preset}: {one}" for preset in presets for one in (shared, f"{own[:-1]} of {preset}.")]
    data = FigureData("measured", ("Three repeats.", *sentences), (Value("3/s lost", 2.5, "%", 0.25),), ())
    save_result(
        tmp_path / "toppings-4-left.json",
        FigureResult(SCHEMA, "toppings", "4-left", 0, data, machine(), versions()),
    )
    page = papers_page(tmp_path)
    assert "| 3/s lost | – | 2.5 ± 0.2 % |" in page
    assert f"\n{shared} Three repeats.\n\n" in page
    assert all(f"- `{preset}`: {own[:-1]} of {preset}.\n" in page for preset in presets)


def test_fetches_are_reported_for_each_place_and_rank() -> None:
    times = {MEMORY: 2.0, PEER: 5.0, DISK: 30.0}
    ranks = (8, 16, 32, 64, 128)
    rounds = [{source: {rank: [ms * rank, ms * rank + 1] for rank in ranks} for source, ms in times.items()}]
    data = figure_data(rounds, dict.fromkeys(ranks, 1.0))
    values = {value.what: value.value for value in data.values}
    assert values["rank 64: another instance ÷ disk"] == pytest.approx(320.5 / 1920.5)
    assert values["rank 8: disk"] == 240.5
    assert by_rank([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == {8: [1, 6], 16: [2, 7], 32: [3, 8], 64: [4, 9], 128: [5, 10]}


def test_a_quarter_of_the_workers_are_several_or_the_figure_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[str] = []

    def measured(figure: dict[str, str], options: PaperOptions) -> FigureData:
        served.append(figure["serve"])
        return FigureData("measured", (), (), ())

    monkeypatch.setattr(servers, "loading_modes", measured)
    for cores in (16, 32):
        monkeypatch.setattr(servers.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        result_of("toppings", "14-cpus")
    assert served == ["--lora-cpus 8,9", "--lora-cpus 16,17,18,19"]
    monkeypatch.setattr(servers.os, "sched_getaffinity", lambda _: {0, 1})
    assert main(["bench", "paper", "toppings", "--figure", "14-cpus"]) == 2
    assert "this figure needs 16 cores" in capsys.readouterr().err


def test_hand_overs_have_a_value_for_each_of_the_papers() -> None:
    points = HandOverPoint(64, 10.0, 11.0), HandOverPoint(256, 20.0, 25.0)
    data = kernels.hand_over_figure(HandOverFigures(64, 8, 16, 128, points), "A100")
    values = {value.what: value.value for value in data.values}
    assert (values["64 tokens: explicit"], values["256 tokens: explicit ÷ sync-free"]) == (11.0, 1.25)
    theirs = [value.what for key in (("toppings", "10"), ("caraserve", "16")) for value in find_figures(*key)[0].theirs]
    assert set(theirs) <= set(values)
