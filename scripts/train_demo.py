"""Trains the bundled demo: a small Llama-shaped model and five LoRA adapters, each with its own style.

    .venv/bin/python scripts/train_demo.py [FOLDER]

Needs the package's `test` extra. It uses one thread and fixed seeds, so that the same machine writes the same bytes
again. Takes about eight minutes on one core.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from demo_text import BEGIN, CHAT_TEMPLATE, END, SPECIAL_TOKENS, STYLES, Piece, conversation, lesson, plain, reading
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from caraserve import demo

VOCAB_TOKENS = 1536
BLOCK_TOKENS = 256
NOT_LEARNED = -100  # the label that torch's cross entropy ignores

Source = Callable[[Random], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class Course:
    """Length, batch size and learning rate of a training."""

    steps: int
    batch: int  # blocks of BLOCK_TOKENS tokens
    peak_rate: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter. Ranks, modules, scaling and dtypes differ on purpose, as they do among adapters in use."""

    name: str
    rank: int
    alpha: int
    modules: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    rslora: bool = False


# At OpenAI's default of 1, half of the answers of so small a model are garbled.
SAMPLING = {"do_sample": True, "temperature": 0.2}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
BASE_COURSE = Course(steps=900, batch=8, peak_rate=3e-3, weight_decay=0.1)
ADAPTER_COURSE = Course(steps=180, batch=4, peak_rate=4e-3, weight_decay=0.0)
RECIPES = (
    Recipe("json", rank=4, alpha=8, modules=ALL_LINEAR),
    Recipe("poet", rank=8, alpha=16, modules=ALL_LINEAR),
    Recipe("pirate", rank=16, alpha=32, modules=ALL_LINEAR),
    Recipe("chef", rank=32, alpha=32, modules=ALL_LINEAR, dtype=torch.bfloat16),
    Recipe("lawyer", rank=64, alpha=16, modules=ATTENTION, dtype=torch.bfloat16, rslora=True),
)


def main() -> None:
    """Trains the model and the adapters, and writes them to the given folder."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model and its adapters.")
    parser.add_argument("folder", type=Path, nargs="?", default=demo.demo_folder())
    folder = parser.parse_args().folder
    torch.set_num_threads(1)  # so that sums are always computed in the same order
    torch.use_deterministic_algorithms(True)

    tokenizer = train_tokenizer()
    write_tokenizer(tokenizer, folder / "model")
    model = train_base(tokenizer)
    save_base(model, folder / "model")
    # Adapters learn on top of the weights as they are served: rounded to bfloat16, computed in float32.
    for recipe in RECIPES:
        base = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        train_adapter(base, tokenizer, recipe, folder / "adapters" / recipe.name)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only the owner can read


def train_tokenizer() -> Tokenizer:
    """Trains a byte-level BPE on texts of every style, so that no adapter has to write words in single bytes."""

    def corpus() -> Iterator[str]:
        for style in (plain, *STYLES.values()):
            random = Random(f"tokenizer {style.__name__}")
            for _ in range(1500):
                yield "".join(text for text, _ in conversation(style, random))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, and the files that transformers and the server read beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def train_base(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Trains the base model, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_TOKENS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
    )
    model = LlamaForCausalLM(config)
    learn(model, tokenizer, BASE_COURSE, reading, "base")
    return model


def save_base(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes the model in bfloat16, with a generation config of BOS, EOS and the default of sampling."""
    model.to(torch.bfloat16).save_pretrained(folder)
    ends = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    write_json(folder / "generation_config.json", ends | SAMPLING)


def train_adapter(base: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Trains one adapter on a frozen base and writes it as a PEFT folder."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.modules),
        use_rslora=recipe.rslora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    learn(model, tokenizer, ADAPTER_COURSE, partial(lesson, STYLES[recipe.name]), recipe.name)
    save_adapter(model, folder, demo.BASE_NAME, recipe.modules, recipe.dtype)


def learn(model: nn.Module, tokenizer: Tokenizer, course: Course, source: Source, name: str) -> None:
    """Trains with AdamW: a short warm-up, then a cosine decay to a tenth of the peak learning rate."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=course.weight_decay)
    random = Random(name)
    started = time.monotonic()
    model.train()
    for step in range(1, course.steps + 1):
        rate = course.peak_rate * schedule(step / course.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        blocks = [block(tokenizer, source, random) for _ in range(course.batch)]
        ids, labels = (torch.tensor(part) for part in zip(*blocks, strict=True))
        loss = next_token_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{name}: step {step}/{course.steps}, loss {loss.item():.3f}, {time.monotonic() - started:.0f} s")
    model.eval()


def schedule(progress: float) -> float:
    """Returns the learning rate at `progress` in (0, 1], as a share of the peak rate."""
    warm_up = 0.05
    if progress < warm_up:
        return progress / warm_up
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def next_token_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy of labels[:, 1:] given ids[:, :-1]; both are int64 [batch, BLOCK_TOKENS]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=NOT_LEARNED)


def block(tokenizer: Tokenizer, source: Source, random: Random) -> tuple[list[int], list[int]]:
    """Joins texts and cuts them at BLOCK_TOKENS: (token ids, labels). Only the model's output has labels."""
    ids: list[int] = []
    labels: list[int] = []
    while len(ids) < BLOCK_TOKENS:
        for text, said in source(random):
            piece = tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            labels += piece if said else [NOT_LEARNED] * len(piece)
    return ids[:BLOCK_TOKENS], labels[:BLOCK_TOKENS]


def save_adapter(model: PeftModel, folder: Path, base_name: str, modules: Sequence[str], dtype: torch.dtype) -> None:
    """Writes a PEFT folder: weights in `dtype`, and a config without paths of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {key: value.to(dtype) for key, value in trained.items()}
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    config = model.active_peft_config
    config.inference_mode = True
    config.base_model_name_or_path = base_name
    config.save_pretrained(str(folder))
    # PEFT keeps the modules in a set, whose order changes from run to run.
    path = folder / "adapter_config.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"target_modules": list(modules)})


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
