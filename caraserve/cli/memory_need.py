"""What a server would take of the memory: weights, the KV cache, adapters, by its options and the model's shapes."""

from dataclasses import dataclass

from caraserve.backend_factory import context_tokens, dtype_of, kv_cache_bytes, kv_cache_dtype
from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.model.plan import DecoderPlan
from caraserve.serve import ADAPTER_BYTES
from caraserve.util.units import human_bytes


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a server takes of one device.

    `kv_bytes`: the KV cache; on a GPU, where adapters share its memory, all that is left. `adapters_bytes`: the most
    that adapters take beside it. `least_bytes`: what it cannot do without. `room_bytes`: of all these together.
    """

    weights_bytes: int
    kv_bytes: int
    kv_token_bytes: int
    adapters_bytes: int
    least_bytes: int
    room_bytes: int
    shares: bool  # whether adapters share the KV cache's memory

    @classmethod
    def on_cpu(
        cls, plan: DecoderPlan, model: ModelConfig, engine: EngineConfig, lora: LoraConfig, room_bytes: int
    ) -> "MemoryNeed":
        """Returns what a server on the CPU takes of `room_bytes` that are free. Raises ConfigError or ModelLoadError
        for options that the model cannot be served with."""
        in_use = ADAPTER_BYTES if lora.lora_pool_bytes is None else lora.lora_pool_bytes
        weights_bytes = plan.weight_bytes(dtype_of(plan, model.dtype).itemsize)
        kv_bytes = kv_cache_bytes(plan, context_tokens(plan, model), engine)
        return cls(
            weights_bytes=weights_bytes,
            kv_bytes=kv_bytes,
            kv_token_bytes=plan.kv_bytes_per_token(kv_cache_dtype(engine).itemsize),
            adapters_bytes=in_use + lora.max_host_adapters_bytes,
            least_bytes=weights_bytes + kv_bytes,
            room_bytes=room_bytes,
            shares=False,
        )

    @classmethod
    def on_gpu(cls, plan: DecoderPlan, model: ModelConfig, engine: EngineConfig, total_bytes: int) -> "MemoryNeed":
        """Returns what a server on a GPU of `total_bytes` takes. Kernels' workspaces, captured graphs and the driver
        itself take 1 to 3 GiB of what is called left here. Raises ModelLoadError for a dtype that is not supported."""
        dtype = dtype_of(plan, model.dtype)
        weights_bytes, room_bytes = plan.weight_bytes(dtype.itemsize), int(engine.gpu_memory_utilization * total_bytes)
        left_bytes, token_bytes = max(0, room_bytes - weights_bytes), plan.kv_bytes_per_token(dtype.itemsize)
        return cls(
            weights_bytes=weights_bytes,
            kv_bytes=left_bytes if engine.kv_cache_bytes is None else engine.kv_cache_bytes,
            kv_token_bytes=token_bytes,
            adapters_bytes=0,
            least_bytes=weights_bytes + (engine.kv_cache_bytes or context_tokens(plan, model) * token_bytes),
            room_bytes=room_bytes,
            shares=True,
        )

    @property
    def most_bytes(self) -> int:
        """What the server takes when all its caches are full."""
        return self.weights_bytes + self.kv_bytes + self.adapters_bytes

    def __str__(self) -> str:
        weights, kv = human_bytes(self.weights_bytes), human_bytes(self.kv_bytes)
        tokens = f"{self.kv_bytes // self.kv_token_bytes:,} tokens" if self.kv_token_bytes else "no keys and values"
        if self.shares:
            room = human_bytes(self.room_bytes)
            return f"weights {weights} of {room}; about {kv} left for adapters and KV blocks, at most {tokens}"
        parts = f"weights {weights}, KV cache {kv} ({tokens}), adapters at most {human_bytes(self.adapters_bytes)}"
        return f"{parts}: {human_bytes(self.most_bytes)} of {human_bytes(self.room_bytes)} that are free"
