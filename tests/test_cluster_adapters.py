"""Adapters of one `caraserve serve` process, served by the others of its fleet, whoever dies or restarts."""

import shutil
import urllib.error
from pathlib import Path

import numpy as np
import pytest

from caraserve import demo
from caraserve.model.spec import load_spec
from tests.processes import Server, fleet, free_ports, until
from tests.unit.folders import tensor_name, write_adapter

COUNT = 1000
FIRST, SECOND, UNUSED = "tiny-0", "tiny-1", "tiny-2"


def write_many(folder: Path) -> None:
    """Adapters of a few kilobytes, all different, that change the demo's answers."""
    model = load_spec(demo.model_folder())
    inputs, outputs = model.site_shape("q_proj")
    rng = np.random.default_rng(0)
    change = {"r": 1, "lora_alpha": 64, "layers_to_transform": [0]}
    for index in range(COUNT):
        tensors = {
            tensor_name(0, "q_proj", "A"): rng.standard_normal((1, inputs), np.float32),
            tensor_name(0, "q_proj", "B"): rng.standard_normal((outputs, 1), np.float32),
        }
        write_adapter(folder / f"tiny-{index}", change, tensors)


def complete(server: Server, name: str) -> str:
    asked = {"model": name, "prompt": "The sea is", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return str(server.ask("/v1/completions", asked)["choices"][0]["text"])


def listed(server: Server) -> set[str]:
    return {model["id"] for model in server.ask("/v1/models")["data"]}


def test_adapters_of_one_are_served_by_all_also_when_it_is_gone(tmp_path: Path) -> None:
    ports = free_ports(3)
    for name in "abc":
        (tmp_path / f"{name} folders").mkdir()
    write_many(tmp_path / "a folders")
    names = {f"tiny-{index}" for index in range(COUNT)}

    def own(name: str) -> tuple[str, ...]:
        return ("--adapters-dir", str(tmp_path / f"{name} folders"), "--routing", "local")

    with fleet(ports, tmp_path, own) as servers:
        a, b, c = servers.values()
        until(lambda: names <= listed(b) and names <= listed(c), 5)
        right = {name: complete(a, name) for name in (FIRST, SECOND)}
        assert right[FIRST] != right[SECOND]
        assert {name: complete(b, name) for name in right} == right
        until(lambda: set(c.adapters()[FIRST]["holders"]) == {"a", "b"}, 5)
        assert b.metric('caraserve:adapter_fetches_total{outcome="ok"') == 2

        a.process.kill()
        until(lambda: c.states()["a"] == "dead", 5)
        assert complete(c, FIRST) == right[FIRST]
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            complete(c, UNUSED)
        assert "cannot be fetched now" in caught.value.read().decode()
        assert complete(c, FIRST) == right[FIRST]
        c.ask("/v1/unload_lora_adapter", {"lora_name": SECOND})
        until(lambda: SECOND not in listed(b), 5)
        until(lambda: len(list((tmp_path / "b.adapters").iterdir())) == 1, 5)

    shutil.rmtree(tmp_path / "a folders")
    (tmp_path / "a folders").mkdir()
    with fleet(ports[:2], tmp_path, own) as servers:
        a, b = servers.values()
        until(lambda: names - listed(a) == names - listed(b) == {SECOND}, 5)
        assert complete(b, FIRST) == right[FIRST]
        assert b.metric("caraserve:adapter_fetches_total") == 0
        assert complete(a, FIRST) == right[FIRST]
