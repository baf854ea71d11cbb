"""Adapters of models with images, as peft saves them: those of the vision tower are left out, and a saved head that is
the base model's is compared with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from caraserve.core.lora_layout import aligned_bytes, stored_vectors
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.families import load_plan
from tests.families.cases import CASES, arguments_of

TARGETS = ["q_proj", "v_proj", "down_proj", "qkv"]
NAMES = ("gemma 3 with images", "qwen 2.5 with images", "mistral 3")


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")
@pytest.mark.parametrize("name", NAMES)
def test_only_the_text_model_is_adapted(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    config = getattr(transformers, f"{case.config}Config")(**arguments_of(case))
    model = getattr(transformers, case.model)(config)
    model.save_pretrained(tmp_path / "model")
    fields = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, modules_to_save=["lm_head"])
    adapted = get_peft_model(model, fields)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(str(tmp_path / "whole"))
    path = tmp_path / "whole" / "adapter_model.safetensors"
    tensors = load_file(path)
    vision = [one for one in tensors if "vis" in one]
    assert vision
    plan = load_plan(tmp_path / "model")
    base, notes = BaseTensors(tmp_path / "model", plan), list[str]()
    spec = inspect_adapter(tmp_path / "whole", plan, base, notes.append)
    assert spec.targets == ("q_proj", "v_proj", "down_proj")
    assert notes[-1].startswith(f"{len(vision)} tensors of parts that text does not use are left out, as base_model.")
    save_file({one: each for one, each in tensors.items() if one not in vision}, path)
    assert inspect_adapter(tmp_path / "whole", plan, base).digest == spec.digest
    (head,) = [one for one in tensors if one.endswith("lm_head.weight")]
    tensors[head][3, 3] += 1
    save_file(tensors, path)
    assert inspect_adapter(tmp_path / "whole", plan, base).digest != spec.digest  # the changed row is kept


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")
def test_dora_takes_norms_of_weights_with_the_names_of_the_wrapping_model(tmp_path: Path) -> None:
    """An untrained adapter has the base's norms as magnitudes, so its factors are 1."""
    case = CASES["mistral 3"]
    model = getattr(transformers, case.model)(getattr(transformers, f"{case.config}Config")(**arguments_of(case)))
    model.save_pretrained(tmp_path / "model")
    fields = LoraConfig(r=4, target_modules=r".*language_model.*\.q_proj", use_dora=True)
    get_peft_model(model, fields).save_pretrained(str(tmp_path / "dora"))
    plan = load_plan(tmp_path / "model")
    base = BaseTensors(tmp_path / "model", plan)
    into = aligned_bytes(inspect_adapter(tmp_path / "dora", plan, base).num_bytes)
    adapter = read_adapter(tmp_path / "dora", plan, into, base)
    for span in adapter.spec.spans:
        site = plan.layers[span.layer].sites[span.site]
        factors, biases = stored_vectors(adapter.data, span, site.outputs)[:, : site.outputs]
        np.testing.assert_allclose(factors, 1, atol=1e-5)
        assert not biases.any()
