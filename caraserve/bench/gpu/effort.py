"""How much a check of a GPU computes and measures."""

from dataclasses import dataclass

from caraserve.bench.synthetic import SHAPES, Shape
from caraserve.model.dtype import Dtype


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes of everything; shares of a stage's time are the stage's own."""

    shape: Shape  # of the model whose speed is measured
    cases: int  # random ones, of each kernel
    vocab: int  # of the tests of sampling
    context: int  # longest of the tests of attention
    tiny_lengths: tuple[int, ...]  # of prompts of the tiny model
    tiny_new: int  # tokens for each of them
    dtypes: tuple[Dtype, ...]  # of activations that are tested
    rounds: int  # of publishing and waiting
    rounds_at_once: int
    kills: int  # of workers that are waited for
    copy_bytes: int  # of the largest copy that is timed
    gemm: int  # side of the square matrices
    replays: int
    lora_pool_bytes: int  # adapters that are rotated over
    lora_rows: tuple[int, ...]
    lora_ranks: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    decodes: int  # iterations in a row
    cold_ranks: tuple[int, ...]
    cold_prompts: tuple[int, ...]
    cold_repeats: int
    graph_bytes: int
    model_pool_bytes: int | None  # for keys, values and adapters; None: what is there
    bystanders: int  # requests that decode while others arrive
    arrivals: int  # of cold requests beside them
    host_bytes: int  # for adapters


_LLAMA = SHAPES["llama2-7b"]
FULL = Effort(
    shape=_LLAMA,
    cases=24,
    vocab=32000,
    context=2100,
    tiny_lengths=(3, 40, 17, 61, 24, 1),
    tiny_new=24,
    dtypes=(Dtype.BF16, Dtype.F32, Dtype.F16),
    rounds=100_000,
    rounds_at_once=1000,
    kills=5,
    copy_bytes=256 << 20,
    gemm=8192,
    replays=50,
    lora_pool_bytes=1 << 30,
    lora_rows=(1, 4, 16, 64),
    lora_ranks=(8, 16, 32, 64, 128),
    batches=(1, 16, 64),
    contexts=(128, 512, 2048),
    prompts=(16, 64, 256, 1024, 2048),
    decodes=24,
    cold_ranks=(16, 64, 256),
    cold_prompts=(16, 128, 1024),
    cold_repeats=3,
    graph_bytes=1 << 30,
    model_pool_bytes=None,
    bystanders=32,
    arrivals=12,
    host_bytes=2 << 30,
)
