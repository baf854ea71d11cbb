"""Tests of `bench modes` with several LoRA kernels: the servers that it starts, and the labels of their runs."""

from pathlib import Path

import pytest
from rich.console import Console

from caraserve.bench.cli import bench_parser
from caraserve.bench.lora.kernels import GpuPoint
from caraserve.bench.lora.report import tables
from caraserve.bench.mode_loads import mode_loads
from caraserve.bench.modes import ModesOptions, ModeVariant, _Prepared, mode_variants
from caraserve.bench.options import LoadOptions
from caraserve.bench.servers import Synthetic


def options(*arguments: str) -> ModesOptions:
    args = bench_parser().parse_args(["modes", *arguments])
    given = {name: getattr(args, name) for name in ModesOptions.__slots__ if name != "serve"}
    return ModesOptions(**given, serve=())


def test_each_mode_is_run_with_each_kernel_in_turn() -> None:
    variants = mode_variants(options("--modes", "auto,cached", "--lora-kernel", "bgmv,bgmv-padded"))
    assert variants == [
        ModeVariant("auto", "bgmv", "auto"),
        ModeVariant("auto", "bgmv-padded", "auto bgmv-padded"),
        ModeVariant("cached", "bgmv", "cached"),
        ModeVariant("cached", "bgmv-padded", "cached bgmv-padded"),
    ]


def test_without_lora_kernels_the_server_uses_its_default() -> None:
    assert mode_variants(options("--modes", "cached")) == [ModeVariant("cached", None, "cached")]


def test_with_one_kernel_the_label_is_the_mode() -> None:
    variants = mode_variants(options("--modes", "cached", "--lora-kernel", "bgmv-padded"))
    assert variants == [ModeVariant("cached", "bgmv-padded", "cached")]


def test_the_kernel_is_passed_to_the_server(tmp_path: Path) -> None:
    chosen, made = options("--lora-kernel", "bgmv-padded"), Synthetic(("model",), (), ("a",), (1 << 20,))
    spec = LoadOptions.from_args(bench_parser().parse_args(["modes"])).spec()
    prepared = _Prepared(chosen, made, tmp_path / "registry", spec, mode_loads(spec, 1), resident=1)
    arguments = prepared.arguments(mode_variants(chosen)[0])
    assert arguments[arguments.index("--lora-kernel") + 1] == "bgmv-padded"
    assert "--lora-kernel" not in prepared.arguments(ModeVariant("cached", None, "cached"))


def test_the_error_for_an_unknown_kernel_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--lora-kernel", "sgmv")
    assert "'sgmv' is no LoRA kernel; there are bgmv, bgmv-padded" in capsys.readouterr().err


def test_the_gpus_points_are_in_a_separate_table() -> None:
    points = [GpuPoint(64, (64,), 58.25, 201.3, 0.82, 116.5), GpuPoint(64, (8, 64), 30.0, 110.0, 0.85, None)]
    console = Console(width=120, record=True)
    for table in tables([], [], [], points):
        console.print(table)
    text = console.export_text()
    assert [word for word in ("58.2", "82%", "2.0", "8+64", "–") if word not in text] == []
