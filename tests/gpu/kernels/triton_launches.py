"""The Triton launches of a whole pass, recorded over tensors without memory, and compiled ahead of time.

No GPU is needed. Works with every release of Triton that pyproject.toml allows.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from caraserve.gpu import weights
from caraserve.gpu.attention import triton as triton_attention
from caraserve.gpu.attention.triton import ATTENTION
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.forward.batch import make_batch
from caraserve.gpu.forward.decoder import Decoder, issue_pass
from caraserve.gpu.forward.warm_up import issue_products
from caraserve.gpu.kernels import experts
from caraserve.gpu.linear import quantized
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.pass_shape import Capacity, PassShape
from caraserve.gpu.memory.request_state import make_delta_nets, make_state
from caraserve.gpu.memory.workspace import make_workspace
from caraserve.model.families import plan_of
from caraserve.model.formats import WeightFormat
from caraserve.model.plan import DecoderPlan
from scripts.laboratory.gpu.null_device import null_device

TOKENS, FEW, MANY, SLOTS = 64, 16, 256, 48
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def identity(self) -> str:
        """Returns a key that is equal for launches which Triton compiles once."""
        return f"{self.name} {self._forms()} {self.options}"

    def compile(self, capability: int) -> Any:
        """Compiles as Triton would at the first launch."""
        constants, signature, hints = self._forms()
        source = ASTSource(self.kernel, signature, constants, hints)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)

    def _forms(self) -> tuple[dict[Any, Any], dict[str, str], dict[Any, Any]]:
        """Returns constants by place, types by name and hints by place: Triton specialises on sizes of 1 and multiples
        of 16."""
        constants, signature, hints = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            fixed = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or (fixed and value == 1):
                signature[parameter.name], constants[(index,)] = "constexpr", value
                continue
            signature[parameter.name] = kind(value)
            if isinstance(value, Tensor) or (fixed and value % 16 == 0):
                hints[(index,)] = [["tt.divisibility", 16]]
        return constants, signature, hints


def kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def recording(patch: pytest.MonkeyPatch) -> list[Launch]:
    """Returns the list to which launches are added from now on, in place of being launched."""
    recorded: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            assert all(0 < size < 65536 for size in grid[1:])
            options = {name: value for name, value in named.items() if name not in kernel.arg_names}
            given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
            recorded.append(Launch(kernel, {name: given[name] for name in kernel.arg_names}, options))

        return launch

    patch.setattr(JITFunction, "__getitem__", record)
    return recorded


def launches_of(
    config: Mapping[str, Any], dtype: torch.dtype, capability: int, form: WeightFormat | None = None
) -> list[Launch]:
    """Returns the distinct launches of a pass over decoding rows and prompts, of products of few and many rows, and of
    the LoRA of q, k and v beside CPU workers, on a device of this compute capability. `config`: of a model, without its
    layers. `form`: of all weights, instead of that in the configuration."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (triton_attention, experts, quantized):
            patch.setattr(module, "compute_capability", lambda device: capability)
        for product in ("_scaled_mm", "_int_mm"):  # which torch does not run without memory
            patch.setattr(torch, product, lambda *arguments, **named: None)
        recorded = recording(patch)
        decoder, base = decoder_of(config, dtype, form), PassShape(TOKENS, 7, 3, 9, 0, False, 2048, frozenset({0}))
        issue_pass(decoder.make_pass(base), Stream(0), len(decoder.plan.layers))
        for rows in (FEW, MANY):
            issue_products(decoder, rows, Stream(0))
        gate = torch.empty(1, dtype=torch.int32, device="meta")
        decoder.lora.pass_over(replace(base, segments=4)).add(0, 0, Stream(0), gate)
    return list({launch.identity: launch for launch in recorded}.values())


def decoder_of(config: Mapping[str, Any], dtype: torch.dtype, form: WeightFormat | None = None) -> Decoder:
    """Returns a decoder of two layers over tensors without memory. `form`: as for `launches_of`."""
    plan = plan_of({**config, "num_hidden_layers": 2})
    if form is not None:
        layers = (layer.with_linears(lambda linear: replace(linear, format=form)) for layer in plan.layers)
        plan = replace(plan, layers=tuple(layers), embed_format=form, head_format=form)
    return decoder_over(plan, dtype, null_device())


def decoder_over(plan: DecoderPlan, dtype: torch.dtype, device: GpuDevice) -> Decoder:
    """Returns a decoder of a plan, with weights that are not filled, whose launches `device` gets."""
    place = device.device
    loaded = weights.load(plan, dtype, 2048, place, lambda name, target: None)
    delta_nets = make_delta_nets(plan, dtype, place, SLOTS)
    state = make_state(plan, dtype, torch.empty(1 << 30, dtype=torch.uint8, device=place), SLOTS, 2048, delta_nets)
    capacity = Capacity(MANY, SLOTS, MANY, ATTENTION.prefill.tile_tokens(dtype, next(plan.attentions).head_dim), SLOTS)
    parts = make_batch(plan, capacity, 64, place), AdapterTables(plan, SLOTS, place)
    room = loaded.room(capacity.tokens)
    workspace = make_workspace(plan, dtype, capacity, 64, 2048, place, ATTENTION.decode, room)
    return Decoder(plan, loaded, state, *parts, workspace, device, ATTENTION)


def usage(compiled: Any) -> dict[str, int]:
    """Returns registers and bytes of stack of a thread, and bytes of shared memory of a block."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    return {
        "registers": max(int(number) for number in re.findall(r"REG:(\d+)", said)),
        "shared": compiled.metadata.shared,
        "stack": sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", said)),
    }
