"""Tiny random checkpoints and adapters in the formats of Hugging Face and peft, of a few families; families/ has all.

Weights are large enough that greedy outputs use much of the vocabulary and that the best token usually wins by a wide
margin, so a test that compares tokens distinguishes a wrong kernel from rounding.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

Kinds: TypeAlias = Mapping[str, Mapping[str, Any]]  # arguments of `make_adapter`, by adapter name

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME_KINDS: Kinds = {
    "r1": {"rank": 1, "targets": ("q_proj", "v_proj")},
    "r8": {"rank": 8, "targets": ALL_TARGETS},
    "r13": {"rank": 13, "targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "rslora": True},
    "r64": {"rank": 64, "targets": ALL_TARGETS, "dtype": "bfloat16"},
    "mlp": {"rank": 5, "targets": ("gate_proj", "up_proj", "down_proj"), "layers": [1], "dtype": "float16"},
}

BOS_ID, EOS_ID = 0, 1
VOCAB_SIZE = 352  # a little more than the tokenizer has, as in published checkpoints with padded embeddings
TOKENIZER_VOCAB_SIZE = 344
MAX_POSITION = 9000
SLIDING_WINDOW = 48

_WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
_ODD: dict[str, Any] = {"hidden_size": 80, "intermediate_size": 144, "num_attention_heads": 5}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
# family: (config class, its traits, whether the tokenizer starts a prompt with BOS)
_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any], bool]] = {
    "llama2": (LlamaConfig, _WIDE | {"num_hidden_layers": 3}, True),
    "llama3": (
        LlamaConfig,
        _WIDE | {"num_hidden_layers": 2, "num_key_value_heads": 2, "rope_parameters": _LLAMA3_ROPE},
        True,
    ),
    "llama_bias": (LlamaConfig, _ODD | {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}, True),
    "mistral": (
        MistralConfig,
        _ODD | {"num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": SLIDING_WINDOW},
        True,
    ),
    "qwen2": (
        Qwen2Config,
        _WIDE | {"num_hidden_layers": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
        False,
    ),
    "qwen3": (
        Qwen3Config,
        _WIDE | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32},
        False,
    ),
}
FAMILIES = tuple(_FAMILIES)
# Embeddings are multiplied by √hidden, and those of the head are not.
_FAMILIES["gemma3"] = (
    Gemma3TextConfig,
    _WIDE
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 8,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    True,
)
_FAMILIES["qwen2_moe"] = (
    Qwen2MoeConfig,
    _WIDE
    | {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
    },
    False,
)

_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the other animals are watching from the river bank.",
    "There is nothing either good or bad in the weather, but thinking about the rain makes the morning longer.",
    "When another letter arrives in the evening, they read it together and then write the answer there.",
)


def make_model(folder: Path, family: str, seed: int = 0, dtype: str = "float32") -> Path:
    """Saves a random model of `family` with its tokenizer into `folder` and returns it.

    Two seeds give two models; the same seed always gives the same bytes.
    """
    config_class, traits, with_bos = _FAMILIES[family]
    config = config_class(**_COMMON | traits)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    _randomise(model, torch.Generator().manual_seed(seed), scales_embeddings=family == "gemma3")
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    save_tokenizer(folder, with_bos)
    return folder


def _randomise(model: torch.nn.Module, generator: torch.Generator, *, scales_embeddings: bool) -> None:
    is_tied = all(name != "lm_head.weight" for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if is_tied and scales_embeddings and name == "model.norm.weight":
            parameter.data = math.sqrt(len(noise)) * (1 + 0.2 * noise)  # or small embeddings would give equal logits
        elif "norm" in name:
            parameter.data = (0 if scales_embeddings else 1) + 0.2 * noise
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif "embed_tokens" in name:
            # Below what the layers add, so that a tied head does not echo its input.
            parameter.data = noise * (0.25 / (math.sqrt(parameter.shape[1]) if scales_embeddings else 1.0))
        else:
            parameter.data = noise * (1.6 / math.sqrt(parameter.shape[1]))


def make_adapter(
    folder: Path,
    model_folder: Path,
    *,
    rank: int,
    targets: Sequence[str] = ALL_TARGETS,
    seed: int,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    layers: Sequence[int] | None = None,
    dtype: str = "float32",
    alpha: float | None = None,
    dora: bool = False,
    invocation: Sequence[int] | None = None,
    tokens: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    saved: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """Saves a random peft adapter for the model in `model_folder` into `folder` and returns it.

    Neither A nor B is zero, and every adapted module changes its weights by about half of their size, whatever the
    rank and the scale. `alpha` is twice the rank unless given; `layers` None means all of them. `invocation`: tokens
    from which on an activated LoRA is active. `tokens`: whose rows of the embedding, or of modules by name, are
    replaced. `saved`: modules that are saved whole, by name, and their rows that are changed.
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]  # peft takes fractions too
        target_modules=list(targets),
        use_rslora=rslora,
        rank_pattern=dict(rank_pattern or {}),
        alpha_pattern=dict(alpha_pattern or {}),
        layers_to_transform=None if layers is None else list(layers),
        task_type="CAUSAL_LM",
        use_dora=dora,
        modules_to_save=list(saved or ()) or None,
        trainable_token_indices=tokens,  # type: ignore[arg-type]
        alora_invocation_tokens=None if invocation is None else list(invocation),
    )
    model: Any = get_peft_model(copy.deepcopy(_loaded(model_folder)), config)
    model.create_or_update_model_card = lambda folder: None  # renders a template, a third of what this takes
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            _randomise_lora(module, generator, getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        for module, rows in (saved or {}).items():
            if f"{module}.modules_to_save" in name:
                parameter.data[list(rows)] += 0.3 * torch.randn((len(rows), parameter.shape[1]), generator=generator)
    # With the base's embedding and head beside their LoRA, which is the default, but with a warning.
    model.save_pretrained(str(folder), save_embedding_layers=not {"embed_tokens", "lm_head"}.isdisjoint(targets))
    return folder


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> Any:
    """Returns a model for the adapters that are made for it one after another; to be copied before it is changed."""
    return AutoModelForCausalLM.from_pretrained(folder)


def make_adapters(folder: Path, model_folder: Path, kinds: Kinds) -> dict[str, Path]:
    """Makes one adapter of each kind, all different; returns their folders by name."""
    return {
        name: make_adapter(folder / name, model_folder, seed=seed, **kind)
        for seed, (name, kind) in enumerate(kinds.items())
    }


def prompt_of(rng: Random, tokens: int) -> list[int]:
    """Returns random tokens without BOS and EOS."""
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def _randomise_lora(layer: Any, generator: torch.Generator, dtype: torch.dtype) -> None:
    if "default" in layer.lora_embedding_A:
        a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
        rank, in_features = len(a), 8  # of which one is 1 and the others are 0
    else:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        rank, in_features = a.shape
    b_std = 0.8 / (layer.scaling["default"] * math.sqrt(rank))
    a.data = (torch.randn(a.shape, generator=generator) / math.sqrt(in_features)).to(dtype)
    b.data = (torch.randn(b.shape, generator=generator) * b_std).to(dtype)
    for magnitude in layer.lora_magnitude_vector.values():
        magnitude.weight.data *= 1 + 0.1 * torch.randn(magnitude.weight.shape, generator=generator)


def save_tokenizer(folder: Path, with_bos: bool) -> None:
    """Saves a byte-level BPE that can encode any text, in the two files that published checkpoints have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
