"""The search for a device runs beside what else a start does, and imports what a GPU needs."""

import asyncio
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from caraserve import backend_factory, serve
from caraserve.backend_factory import DeviceSearch
from caraserve.demo import model_folder
from caraserve.errors import ConfigError
from caraserve.gpu.driver.detect import DeviceChoice
from tests.serving import engine_config, lora_config, model_config, running

PATIENCE_S = 30.0


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes this machine one with a GPU's driver and with packages of the names `late_a` and `late_b` alone."""
    for name in ("late_a", "late_b"):
        (tmp_path / f"{name}.py").write_text("import threading; thread = threading.current_thread()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(backend_factory, "library_folder", lambda: tmp_path)
    monkeypatch.setattr(backend_factory, "has_packages", lambda: True)
    monkeypatch.setattr(backend_factory, "_GPU_PACKAGES", ("late_a", "missing", "late_b"))


def imported() -> Mapping[str, object]:
    found = {name: module.thread for name, module in sys.modules.items() if name in ("late_a", "late_b")}
    for name in found:
        del sys.modules[name]
    return found


@pytest.mark.usefixtures("with_driver")
def test_packages_are_imported_on_a_thread_while_the_device_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_factory, "detect", lambda wanted: DeviceChoice("cuda", wanted))
    before = set(threading.enumerate())
    assert DeviceSearch("auto").choice() == DeviceChoice("cuda", "auto")
    found = imported()
    assert found.keys() == {"late_a", "late_b"}
    assert threading.current_thread() not in found.values()
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("with_driver")
def test_nothing_is_imported_for_a_cpu_or_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def refuse(wanted: str) -> DeviceChoice:
        goes_on.wait(PATIENCE_S)
        raise ConfigError("no GPU")

    assert DeviceSearch("cpu").choice() == DeviceChoice("cpu")
    assert not imported()
    monkeypatch.setattr(backend_factory, "detect", refuse)
    monkeypatch.setattr(backend_factory, "has_packages", lambda: False)
    search = DeviceSearch("cuda")
    search.close()
    goes_on.set()
    with pytest.raises(ConfigError, match="no GPU"):
        search.choice()
    assert not imported()


def test_a_server_reads_its_model_while_it_looks_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, load = threading.Event(), serve.load_plan

    def find(wanted: str) -> DeviceChoice:
        assert is_reading.wait(PATIENCE_S)
        return DeviceChoice("cpu", "found")

    def reading(folder: Path) -> object:
        is_reading.set()
        return load(folder)

    def stop(*arguments: object) -> None:
        *_, search = arguments
        assert isinstance(search, DeviceSearch)
        raise ConfigError(search.choice().note)

    monkeypatch.setattr(backend_factory, "detect", find)
    monkeypatch.setattr(serve, "load_plan", reading)
    monkeypatch.setattr(serve, "build_backend", stop)

    async def start() -> None:
        async with running(model_config(model_folder()), lora_config({}), engine_config()):
            pass

    with pytest.raises(ConfigError, match="found"):
        asyncio.run(start())
