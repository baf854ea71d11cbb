"""`caraserve adapter` says what a folder holds and what is served of it, and converts it to PEFT's files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from caraserve import demo
from caraserve.cli.main import main
from caraserve.lora.peft import inspect_adapter
from tests.lora.folders import FIELDS, SPEC, TARGETS, tensors_for, write_adapter
from tests.lora.test_writers import gguf, in_pairs, mistral, mlx

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FIELDS))
    head = np.random.default_rng(0).standard_normal((96, 64), np.float32)
    save_file({"lm_head.weight": head}, tmp_path / "model" / "model.safetensors")
    return str(tmp_path / "model")


def run(capture: Capture, *words: str) -> tuple[int, list[str], str]:
    code = main(["adapter", *words])
    out, err = capture.readouterr()
    return code, out.splitlines(), err


def test_a_folder_is_described_without_a_model(capsys: Capture) -> None:
    code, lines, err = run(capsys, "inspect", str(demo.adapters_folder() / "json"))
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines] == ["files", "method", "base", "tensors"]
    assert "adapter_config.json, adapter_model.safetensors" in lines[0]
    assert lines[0].endswith("as PEFT writes them")


def test_what_is_applied_and_what_is_left_out_is_said(tmp_path: Path, model: str, capsys: Capture) -> None:
    head = load_file(f"{model}/model.safetensors")["lm_head.weight"]
    copy = {"base_model.model.lm_head.base_layer.weight": head}
    folder = write_adapter(tmp_path / "a", {"target_modules": ["q_proj", "qkv"]}, tensors_for() | copy)
    code, lines, err = run(capsys, "inspect", str(folder), "--model", model)
    assert (code, err) == (0, "")
    assert lines[3:-1] == [
        "served on llama, weights in float32",
        "applied   q_proj in 2 of 2 layers; rank 4; scale 2",
        "left out  adapter_config.json: target_modules has 'qkv', which the base model lacks",
        "left out  base_model.model.lm_head.base_layer.weight: the same as in the base model",
    ]
    assert lines[-1].startswith("served as ")
    assert lines[-1].endswith(f"in F32, digest {inspect_adapter(write_adapter(tmp_path / 'b'), SPEC).digest}")


def test_changes_of_the_head_are_said(tmp_path: Path, model: str, capsys: Capture) -> None:
    head = load_file(f"{model}/model.safetensors")["lm_head.weight"]
    head[[3, 5]] += 1
    fields = {"modules_to_save": ["lm_head"]}
    folder = write_adapter(tmp_path / "a", fields, tensors_for() | {"base_model.model.lm_head.weight": head})
    code, lines, err = run(capsys, "inspect", str(folder), "--model", model)
    assert (code, err) == (0, "")
    assert "applied   q_proj in 2 of 2 layers; lm_head; rank 4; scale 2; 2 rows of the head" in lines
    code, lines, err = run(capsys, "import", str(folder), str(tmp_path / "b"), "--model", model)
    assert (code, lines, (tmp_path / "b").exists()) == (1, [], False)
    assert "lm_head is changed; only LoRA of layers can be written" in err


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_a_score_head_is_said_and_not_left_out_of_a_conversion(
    tmp_path: Path, model: str, capsys: Capture, task: str | None
) -> None:
    tensors = tensors_for() | {"base_model.model.score.weight": np.ones((3, SPEC.hidden), np.float32)}
    folder = write_adapter(tmp_path / "a", {"task_type": task}, tensors)
    _, lines, _ = run(capsys, "inspect", str(folder), "--model", model)
    assert any(line.endswith("; a score head of 3 classes") for line in lines)
    code, lines, err = run(capsys, "import", str(folder), str(tmp_path / "b"), "--model", model)
    assert (code, lines, (tmp_path / "b").exists()) == (1, [], False)
    assert "base_model.model.score.weight is a score head; only LoRA of layers can be written" in err


def test_the_kind_and_the_score_head_are_said(tmp_path: Path, model: str, capsys: Capture) -> None:
    fields = {"task_type": "SEQ_CLS", "use_rslora": True}
    head = {"base_model.model.score.weight": np.ones((3, 64), np.float32)}
    folder = write_adapter(tmp_path / "a", fields, tensors_for() | head)
    code, lines, _ = run(capsys, "inspect", str(folder), "--model", model)
    assert code == 0
    assert lines[1] == "method    peft_type 'LORA', r 4, lora_alpha 8, use_rslora True, task_type 'SEQ_CLS'"
    assert "applied   q_proj in 2 of 2 layers; rank 4; scale 4; a score head of 3 classes" in lines
    code, _, err = run(capsys, "import", str(folder), str(tmp_path / "b"), "--model", model)
    assert (code, (tmp_path / "b").exists()) == (1, False)
    assert "base_model.model.score.weight is a score head; only LoRA of layers can be written" in err


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "a field": ({"use_dora": True, "kasa_config": 1}, 1, "adapter_config.json: "),
    "a rank": ({"r": 5}, 1, "rank 5 on this base model needs [5, 64]"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("command", ["inspect", "import"])
def test_a_refused_adapter_is_one_line_and_exit_code_1(
    tmp_path: Path, model: str, capsys: Capture, kind: str, command: str
) -> None:
    fields, expected, why = WRONG[kind]
    folder, target = write_adapter(tmp_path / "a", fields), tmp_path / "b"
    code, _, err = run(capsys, command, str(folder), *([str(target)] if command == "import" else []), "--model", model)
    assert code == expected
    assert why in err
    assert err.count("\n") == 1
    assert not target.exists()


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["inspect", "nowhere"], 2, "'nowhere' is not a folder"),
        (["inspect", "made/adapter_config.json"], 2, "is not a folder; give the folder that it is in"),
        (["inspect", "empty"], 1, "the folder is empty"),
        (["inspect"], 2, "FOLDER"),
        (["import", "empty", "x"], 2, "--model"),
        (["import", "made", "made", "--model", "model"], 2, "'made' cannot be made: File exists"),
        (["inspect", "made", "--model", "empty"], 1, "config.json"),
        (["paint"], 2, "paint"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, model: str, capsys: Capture, words: list[str], code: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_adapter(tmp_path / "made")
    found, _, err = run(capsys, *words)
    assert (found, why in err, err.count("\n")) == (code, True, 1), err


@pytest.mark.parametrize("writer", ["PEFT", "MLX", "GGUF", "mistral-finetune"])
def test_import_writes_what_peft_applies_as_it_is_served_here(
    tmp_path: Path, model: str, capsys: Capture, writer: str
) -> None:
    tensors, source, target = tensors_for(TARGETS), tmp_path / "source", tmp_path / "there" / "target"
    write = {"PEFT": write_adapter, "MLX": mlx, "GGUF": gguf, "mistral-finetune": mistral}[writer]
    if writer == "PEFT":
        fields = {"target_modules": list(TARGETS), "use_rslora": True, "lora_alpha": 3, "revision": "main"}
        write_adapter(source, fields, tensors)
    else:
        write(source, in_pairs(tensors) if writer == "GGUF" else tensors)  # type: ignore[operator]
    code, lines, err = run(capsys, "import", str(source), str(target), "--model", model)
    assert (code, err) == (0, "")
    expected = inspect_adapter(source, SPEC)
    assert lines[-1].endswith(
        f"q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, rank 4, digest {expected.digest}"
    )
    assert inspect_adapter(target, SPEC) == expected
    written = load_file(target / "adapter_model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensors[name]) for name in tensors)
    create: Any = AutoModelForCausalLM.from_config
    adapted = PeftModel.from_pretrained(create(LlamaConfig(**FIELDS)), str(target))
    assert adapted.peft_config["default"].revision == ("main" if writer == "PEFT" else None)
    scaling = adapted.get_submodule("base_model.model.model.layers.1.mlp.up_proj").scaling["default"]
    assert scaling == expected.spans[0].scale


def test_an_adapter_of_some_modules_is_imported_by_their_names(tmp_path: Path, model: str, capsys: Capture) -> None:
    tensors = {name: each.astype(np.float16) for name, each in tensors_for(("q_proj",), (1,)).items()}
    source = write_adapter(tmp_path / "a", {"layers_to_transform": [1]}, tensors)
    assert run(capsys, "import", str(source), str(tmp_path / "b"), "--model", model)[0] == 0
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["target_modules"] == [
        "model.layers.1.self_attn.q_proj"
    ]
    assert inspect_adapter(tmp_path / "b", SPEC) == inspect_adapter(source, SPEC)
