"""Adapters of one `caraserve serve` process, served by the others of its fleet, also after deaths and restarts. The
base model is a GGUF file, and one of the adapters too."""

import random
import shutil
import urllib.error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from caraserve import demo
from caraserve.lora.folder_contents import TENSORS_NAME
from tests.families import gguf_models
from tests.lora.test_writers import gguf, interleaved
from tests.model.gguf_files import tokenizer_metadata
from tests.processes import Server, fleet, free_ports, tiny_adapter, until

NAMES = [f"tiny-{index}" for index in range(500)]
# A placement copies the unused in the order of their names, and so these last.
FIRST, SECOND, UNUSED = "tiny-7", "tiny-8", "tiny-9"
SAMPLE = random.Random(0).sample(NAMES[400:], 10)
AT_ONCE = 8  # requests


def complete(server: Server, name: str) -> str:
    asked = {"model": name, "prompt": "The sea is", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return str(server.ask("/v1/completions", asked)["choices"][0]["text"])


def complete_all(server: Server, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: complete(server, name), names), strict=True))


def has_fetched(server: Server, count: int) -> bool:
    """Whether a server has downloaded `count` adapters for requests; those moved by a placement are not counted."""
    fetched = server.metric('caraserve:adapter_fetches_total{outcome="ok"')
    return count <= fetched <= count + server.metric('caraserve:plan_moves_total{outcome="fetched"')


def base_model(path: Path) -> Path:
    """Writes the demo's model as a GGUF file."""
    folder = demo.model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder)
    return gguf_models.write(model, path, tokenizer_metadata(folder), dtype="BF16")


def as_gguf(folder: Path) -> None:
    """Replaces an adapter of q_proj by a GGUF file."""
    tensors, heads = load_file(folder / TENSORS_NAME), 6
    shutil.rmtree(folder)
    stored = {name: interleaved(each, heads) if "lora_B" in name else each for name, each in tensors.items()}
    gguf(folder, stored, **{"adapter.lora.alpha": 64.0})


def listed(server: Server) -> set[str]:
    return {model["id"] for model in server.ask("/v1/models")["data"]}


def test_adapters_of_one_instance_are_served_by_all_also_after_it_has_left(tmp_path: Path) -> None:
    ports = free_ports(3)
    for name in "abc":
        (tmp_path / f"{name} folders").mkdir()
    for seed, name in enumerate(NAMES):
        tiny_adapter(tmp_path / "a folders" / name, seed)
    as_gguf(tmp_path / "a folders" / SECOND)
    names, model = set(NAMES), base_model(tmp_path / "m.gguf")

    def own(name: str) -> tuple[str, ...]:
        return ("--model", str(model), "--adapters-dir", str(tmp_path / f"{name} folders"), "--routing", "local")

    with fleet(ports, tmp_path, own) as servers:
        a, b, c = servers.values()
        until(lambda: names <= listed(b) and names <= listed(c), 5)
        right = {name: complete(a, name) for name in (FIRST, SECOND)}
        assert {name: complete(b, name) for name in right} == right
        until(lambda: set(c.adapters()[FIRST]["holders"]) >= {"a", "b"}, 5)
        until(lambda: has_fetched(b, 2), 5)
        right |= complete_all(a, SAMPLE)
        assert len(set(right.values())) == len(right), "an answer could be another adapter's"
        for server, count in ((b, 2 + len(SAMPLE)), (c, len(SAMPLE))):
            assert complete_all(server, SAMPLE) == {name: right[name] for name in SAMPLE}
            until(partial(has_fetched, server, count), 5)

        a.process.kill()
        until(lambda: c.states()["a"] == "dead", 5)
        assert complete(c, FIRST) == right[FIRST]
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            complete(c, UNUSED)
        assert "cannot be downloaded now" in caught.value.read().decode()
        assert complete(c, FIRST) == right[FIRST]
        second = tmp_path / "b.adapters" / b.adapters()[SECOND]["digest"]
        assert second.is_file()
        c.ask("/v1/unload_lora_adapter", {"lora_name": SECOND})
        until(lambda: SECOND not in listed(b), 5)
        until(lambda: not second.exists(), 5)

    shutil.rmtree(tmp_path / "a folders")
    (tmp_path / "a folders").mkdir()
    with fleet(ports[:2], tmp_path, own) as servers:
        a, b = servers.values()
        until(lambda: names - listed(a) == names - listed(b) == {SECOND}, 5)
        assert complete(b, FIRST) == right[FIRST]
        assert b.metric('caraserve:adapter_fetches_total{outcome="ok"') == 0
        assert complete(a, FIRST) == right[FIRST]
