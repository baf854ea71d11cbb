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
    assert "SmolLM2-135M.Q4_1 is not a valid GGUF file: it ends within its header, at byte 8: copy it again" in refusal(
        path
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html>", "its first bytes are b'<!DOCTYPE html><'; is it a page of a failed download?"),
        (b"tjgg\3\0\0\0", "it is of the formats before GGUF, which are not read"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "it is a pointer of Git LFS; `git lfs pull`"),
    ],
)
def test_a_file_that_is_only_named_as_gguf_says_what_it_is(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert f"'{path}' does not begin as GGUF files do: {words}" in refusal(path)


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
    for name in ("model.gguf", "b-mmproj.gguf", "n.gguf"):
        (tmp_path / name).touch()
    assert f"has no config.json; give one of its GGUF files, as '{tmp_path / 'model.gguf'}'" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # as repositories of GGUF files have it
    assert f"has no safetensors weights; give one of its GGUF files, as '{tmp_path}/model.gguf'" in refusal(tmp_path)


def test_an_adapter_is_served_with_its_base_model() -> None:
    folder = demo.adapters_folder() / "poet"
    assert f"is an adapter, not a base model: serve its base model with --lora-modules poet={folder}" in refusal(folder)


def test_what_does_not_exist_and_looks_like_a_name_of_the_hub_is_fetched_by_hf() -> None:
    assert "hf download org/name --local-dir name" in refusal(Path("org/name"))
    assert "hf download org/a-GGUF --include '*Q4_K_M*.gguf' --local-dir a-GGUF" in refusal(Path("org/a-GGUF"))
    assert "hf download org/a --include '*Q8_0*.gguf' --local-dir a` and serve" in refusal(Path("org/a:Q8_0"))
    assert refusal(Path("org/a.gguf")) == "model file 'org/a.gguf' does not exist"
    assert "does not exist; give a folder that holds config.json" in refusal(Path("/nowhere/at/all"))


def test_a_folder_that_cannot_be_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert f"{tmp_path}/config.json cannot be read: Is a directory" in refusal(tmp_path)
