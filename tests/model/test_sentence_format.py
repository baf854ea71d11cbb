"""How a folder of sentence-transformers says that its model embeds texts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from caraserve.errors import ModelLoadError
from caraserve.model.sentence_format import LAST_TOKEN, SentenceFormat, read_sentence_format

TYPES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}


def folder(
    path: Path, pooling: dict[str, Any] | None, prompts: Any = None, types: dict[str, str] | None = None
) -> Path:
    """Writes the files. `pooling`: of its configuration."""
    modules = [
        {"idx": at, "name": str(at), "path": where, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, where) in enumerate((TYPES if types is None else types).items())
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    if prompts is not None:
        (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return path


def modes(**chosen: bool) -> dict[str, bool]:
    """Returns the switches of all modes, as the library writes them."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {f"pooling_mode_{name}": chosen.get(name, False) for name in names}


def test_a_folder_without_the_files_embeds_by_its_last_token(tmp_path: Path) -> None:
    assert read_sentence_format(tmp_path) == LAST_TOKEN == SentenceFormat("last", True, {}, "")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (modes(lasttoken=True), "last"),
        (modes(mean_tokens=True), "mean"),
        (modes(cls_token=True), "first"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_pooling_module_says_how_tokens_are_pooled(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    assert read_sentence_format(folder(tmp_path, pooling)).pooling == expected


def test_vectors_are_scaled_only_where_a_module_does_so(tmp_path: Path) -> None:
    types = {"Transformer": "", "Pooling": "1_Pooling"}
    assert not read_sentence_format(folder(tmp_path, modes(lasttoken=True), types=types)).normalizes


def test_prompts_are_read_by_name(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
    found = read_sentence_format(folder(tmp_path, modes(lasttoken=True), prompts))
    assert (found.prompts, found.default_prompt) == (prompts["prompts"], "Query: ")


@pytest.mark.parametrize(
    ("pooling", "prompts", "types", "reason"),
    [
        (modes(max_tokens=True), None, None, "pools by max_tokens; one of lasttoken, mean or cls"),
        (modes(mean_tokens=True, max_tokens=True), None, None, "pools by mean_tokens, max_tokens"),
        (modes(), None, None, "pools by nothing"),
        (None, None, None, "is missing, and modules.json names it"),
        (modes(lasttoken=True), None, {**TYPES, "Dense": "3_Dense"}, "has the module 'Dense'"),
        (modes(lasttoken=True), None, {"Transformer": "", "Pooling": "../other"}, "leads outside"),
        (modes(lasttoken=True), {"prompts": ["a"]}, None, "prompts must be texts by name"),
        (modes(lasttoken=True), {"prompts": {"a": 1}}, None, "prompts must be texts by name"),
        (modes(lasttoken=True), {"prompts": {"a": "\ud800"}}, None, "prompts must be texts by name"),
        (modes(lasttoken=True), {"default_prompt_name": "a"}, None, "default_prompt_name is 'a'"),
        (modes(lasttoken=True), {"default_prompt_name": ["a"]}, None, "default_prompt_name is \"['a']\""),
        (modes(lasttoken=True), None, {"Transformer": "", "Pooling": "a\0b"}, "leads outside"),
        (modes(mean_tokens=True) | {"include_prompt": False}, {"prompts": {"a": "b"}}, None, "include_prompt is false"),
    ],
)  # fmt: skip
def test_what_would_make_other_embeddings_is_refused(
    tmp_path: Path, pooling: dict[str, Any] | None, prompts: Any, types: dict[str, str] | None, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(reason)):
        read_sentence_format(folder(tmp_path, pooling, prompts, types))


@pytest.mark.parametrize("name", ["modules.json", "config_sentence_transformers.json"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_file_that_is_not_valid_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=name):
        read_sentence_format(tmp_path)
