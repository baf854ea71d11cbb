"""What is said of a path that was given as a model and is none."""

from pathlib import Path

import pytest

from caraserve import demo
from caraserve.errors import ModelLoadError
from caraserve.model.families import load_plan


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_plan(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "SmolLM2-135M.Q4_1"
    path.write_bytes(b"GGUF\3\0\0\0")
    assert "SmolLM2-135M.Q4_1 is not a valid GGUF file: its header has more than 8 bytes" in refusal(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("README.md", "is a file, not a model: give a folder that holds config.json"),
        ("model.safetensors", "is a file of weights: give the folder that it is in"),
        ("config.json", "is a file, not a model"),
    ],
)
def test_another_file_is_a_file(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    assert words in refusal(tmp_path / name)


def test_a_folder_without_a_model_says_what_it_has_instead(tmp_path: Path) -> None:
    assert "has no config.json; give a folder" in refusal(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert f"has no config.json; give one of its GGUF files, as '{tmp_path / 'model.gguf'}'" in refusal(tmp_path)


def test_an_adapter_is_served_with_its_base_model() -> None:
    folder = demo.adapters_folder() / "poet"
    assert f"is an adapter, not a base model: serve its base model with --lora-modules poet={folder}" in refusal(folder)


def test_what_does_not_exist_and_looks_like_a_name_of_the_hub_is_fetched_by_hf() -> None:
    assert "hf download org/name --local-dir name" in refusal(Path("org/name"))
    assert refusal(Path("/nowhere/at/all")).endswith("does not exist; give a folder that holds config.json")


def test_a_folder_that_cannot_be_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert f"{tmp_path}/config.json cannot be read: Is a directory" in refusal(tmp_path)
