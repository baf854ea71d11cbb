"""Trains the four LoRA adapters of `--demo smollm2`.

    .venv/bin/python scripts/train_smollm2.py [FOLDER] [--only NAME …]

Needs the package's `test` extra, and a network the first time: the model is downloaded once. It uses one thread and
fixed seeds, so that the same machine writes the same bytes again. Takes about twenty minutes on one core.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from smollm2_text import LESSONS, Exchange
from torch import Tensor
from train_demo import NOT_LEARNED, save_adapter, schedule
from transformers import LlamaConfig, LlamaForCausalLM

from caraserve.demo import smollm2
from caraserve.model.base_linears import BaseLinears
from caraserve.model.families import load_plan
from caraserve.model.formats.gguf_blocks import gguf_format
from caraserve.model.gguf.reader import GgufReader, gguf_config, opened_model
from caraserve.model.plan import DecoderPlan
from caraserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

BATCH = 4
END = "<|im_end|>"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter. Ranks and modules differ on purpose, as they do among adapters in use."""

    name: str
    rank: int
    modules: tuple[str, ...]
    steps: int  # of BATCH conversations
    peak_rate: float = 3e-3


RECIPES = (
    Recipe("pirate", rank=8, modules=("q_proj", "v_proj"), steps=50),
    Recipe("sql", rank=16, modules=("q_proj", "v_proj"), steps=70),
    Recipe("to-json", rank=4, modules=ATTENTION, steps=50),
    Recipe("tools", rank=8, modules=("q_proj", "v_proj"), steps=32),
)


def main() -> None:
    """Trains the adapters, and writes them to the given folder."""
    parser = argparse.ArgumentParser(description="Train the adapters of --demo smollm2.")
    parser.add_argument("folder", type=Path, nargs="?", default=smollm2.adapters_folder())
    parser.add_argument("--only", nargs="+", choices=list(LESSONS), default=list(LESSONS), metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so that sums are always computed in the same order
    torch.use_deterministic_algorithms(True)
    path = smollm2.model_file()
    plan = load_plan(path)
    tokenizer = load_tokenizer(path, plan, None, smollm2.TOOL_CALL_PARSER)
    for recipe in RECIPES:
        if recipe.name in args.only:
            train(load_base(path, plan), tokenizer, recipe, args.folder / recipe.name)


def load_base(path: Path, plan: DecoderPlan) -> LlamaForCausalLM:
    """Returns the model of a GGUF file with its weights as numbers, in float32."""
    model = LlamaForCausalLM(LlamaConfig(**gguf_config(path)))
    linears = BaseLinears(path, plan.stored_names)
    tensors = {
        f"{linear.module}.weight": np.concatenate(list(linears.weights(linear)))
        for layer in plan.layers
        for linear in layer.linears
    }
    with GgufReader(path, plan.stored_names) as reader:
        for name, parameter in model.named_parameters():
            if name == plan.embed:
                form = gguf_format(opened_model(path).kind(plan.stored_names(name)[0]))
                tensors[name] = form.values(form.read(reader, name.removesuffix(".weight"), parameter.shape))
            elif name not in tensors:
                tensors[name], _ = reader(name, tuple(parameter.shape))
    model.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)
    return model


def train(base: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Trains one adapter on the frozen base and writes it as a PEFT folder."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=list(recipe.modules), task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    random = Random(recipe.name)
    started_s, losses = time.process_time(), []
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * schedule(step / recipe.steps)
        loss = answers_loss(model.get_base_model(), [LESSONS[recipe.name](random) for _ in range(BATCH)], tokenizer)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            mean, cpu_s = sum(losses[-10:]) / 10, time.process_time() - started_s
            print(f"{recipe.name}: step {step}/{recipe.steps}, loss {mean:.3f}, {cpu_s:.0f} s", flush=True)
    save_adapter(model, folder, smollm2.TRAINED_ON, recipe.modules, torch.bfloat16)
    (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors writes files that only the owner can read


def answers_loss(model: LlamaForCausalLM, exchanges: list[Exchange], tokenizer: Tokenizer) -> Tensor:
    """Returns the mean cross entropy of the answers' tokens. The head computes no others: it is a fifth of the work."""
    rows = [_ids(exchange, tokenizer) for exchange in exchanges]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), longest), 0)
    labels = torch.full((len(rows), longest), NOT_LEARNED)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    # Padding comes last, where causal attention keeps it from all that is learned.
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    learned = labels[:, 1:] != NOT_LEARNED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), labels[:, 1:][learned])


def _ids(exchange: Exchange, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens of the prompt, as the server makes it, and those of the answer."""
    prompt = tokenizer.chat(exchange.messages, add_generation_prompt=True, tools=exchange.tools)
    return prompt, tokenizer.encode(exchange.answer + END, add_special_tokens=False)


if __name__ == "__main__":
    main()
