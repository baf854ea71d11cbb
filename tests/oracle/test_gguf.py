"""A GGUF file of mixed types, with its own tokenizer, answers like transformers and peft over the same numbers."""

import asyncio
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from caraserve.model.formats.gguf_blocks import GGUF_BLOCKS
from caraserve.model.gguf_reader import GgufFile
from tests.families.gguf_models import metadata_of, tensors_of
from tests.lora.test_writers import gguf, in_pairs
from tests.model.gguf_files import Blocks, random_blocks, tokenizer_metadata, write_gguf
from tests.model.tensors import Tensors
from tests.oracle.models import ALL_TARGETS, VOCAB_SIZE, make_adapter, prompt_of, save_tokenizer
from tests.oracle.oracle import Oracle
from tests.serving import engine_config, lora_config, model_config, running, submit

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# The largest scale of each kind, with which weights are as large as a trained model's for these sizes.
SCALES = {"Q4_K": 1 / 4000, "Q6_K": 1 / 16000, "Q8_0": 1 / 600, "Q4_0": 1 / 40}


def kind_of(name: str, index: int) -> str:
    """Returns the kind of a matrix: the embedding and the head have their own, as in files of K_M kinds."""
    return {"model.embed_tokens.weight": "Q6_K", "lm_head.weight": "Q8_0"}.get(name, list(SCALES)[index % len(SCALES)])


def values_of(name: str, blocks: Blocks) -> NDArray[np.float32]:
    form = GGUF_BLOCKS[blocks.kind]
    return form.values(form.read(Tensors({name: blocks.rows}), name.removesuffix(".weight"), blocks.shape))


def in_file(
    state: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks], config: LlamaConfig
) -> Iterator[tuple[str, NDArray[Any] | Blocks]]:
    """Yields tensors under their names, and with their rows in the order, of GGUF files."""
    for name, tensor in state.items():
        own = blocks.get(name)
        ((stored, values),) = tensors_of("llama", {name: tensor if own is None else torch.from_numpy(own.rows)}, config)
        yield stored, values if own is None else Blocks(own.kind, values.astype(np.uint8))


def make(folder: Path) -> tuple[Path, Path]:
    """Writes a model as a GGUF file, and as a folder of the numbers of its blocks; returns both."""
    rng, path, plain = np.random.default_rng(0), folder / "model.gguf", folder / "plain"
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32)  # type: ignore[no-untyped-call]
    blocks = dict[str, Blocks]()
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        if tensor.ndim == 2:
            kind = kind_of(name, index)
            blocks[name] = random_blocks(rng, kind, *tensor.shape, SCALES[kind])
            tensor.copy_(torch.from_numpy(values_of(name, blocks[name])))
        else:
            tensor.copy_(1 + 0.2 * torch.from_numpy(rng.standard_normal(tensor.shape)))
    model.save_pretrained(plain)
    save_tokenizer(plain, with_bos=False)
    metadata = metadata_of("llama", model.config) | tokenizer_metadata(plain)
    write_gguf(path, metadata, dict(in_file(model.state_dict(), blocks, model.config)))
    return path, plain


async def test_a_gguf_file_answers_like_its_numbers_with_adapters_of_both_kinds(tmp_path: Path) -> None:
    path, plain = make(tmp_path)
    with GgufFile(path) as file:
        assert {file.tensor(name).kind for name in file.names} == {"F32", *SCALES}
    peft = make_adapter(tmp_path / "peft", plain, rank=8, targets=ALL_TARGETS, seed=1)
    tensors = load_file(peft / "adapter_model.safetensors")
    adapters = {"peft": peft, "gguf": gguf(tmp_path / "gguf", in_pairs(tensors), **{"adapter.lora.alpha": 16.0})}
    oracle, rng = Oracle(plain, {"peft": peft}), random.Random(1)
    asked = [(prompt_of(rng, tokens), name) for tokens in (3, 40) for name in (None, *adapters)]
    async with running(model_config(path), lora_config(adapters), engine_config()) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=10) for each in asked))
    tokenizer = AutoTokenizer.from_pretrained(plain)
    for (prompt, name), answer in zip(asked, answers, strict=True):
        oracle.check_greedy(prompt, name and "peft", answer.token_ids)
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert oracle.forgiven_ties <= 1
    assert len({tuple(answer.token_ids) for answer in answers}) > 4
