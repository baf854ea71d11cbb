"""What runs once before serving, so that no kernel is compiled or loaded while requests wait.

Triton compiles a kernel again for other alignments of its pointers and for some values of its sizes. cuBLAS has many
kernels for one product, loads each at its first use, and chooses among them by the number of rows. The kernels of a
graph run before it is captured; passes that are launched kernel by kernel may have any number of rows.
"""

from collections.abc import Callable
from typing import Any

from caraserve.core.batch import BASE_ADAPTER_SLOT, ScheduledRow
from caraserve.errors import ConfigError
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.forward.batch import Capacity, PassShape
from caraserve.gpu.forward.decoder import Decoder
from caraserve.gpu.forward.flashinfer_prefill import LEAST_TOKENS, FlashInferPrefill, Ints
from caraserve.gpu.memory.request_state import BLOCK_TOKENS
from caraserve.gpu.quantized_linear import QuantizedLinear
from caraserve.gpu.weights import Linear

_STEPS = 16  # to each doubling of rows: where cuBLAS' choice changes is not documented


def warm_up_shapes(capacity: Capacity, max_context: int) -> list[PassShape]:
    """Returns shapes of passes that cover the kernels' variants: Triton specialises on the size 1 and on multiples of
    16."""
    shapes = []
    for tokens in (1, 2, 16):
        if tokens <= capacity.tokens:
            rows, segments = min(tokens, capacity.rows), min(1, capacity.segments)
            shapes.append(PassShape(tokens, rows, 1, min(tokens, capacity.outputs), segments, True, max_context))
    return shapes


def product_rows(most: int) -> list[int]:
    """Returns the numbers of rows, up to `most`, with which each base product is computed before serving: all up to
    32, then 16 to each doubling. For 2048 rows these are 128, computed within a second."""
    rows = [1]
    while rows[-1] < most:
        power = 1 << rows[-1].bit_length() - 1  # the largest power of two that is not above
        rows.append(min(most, rows[-1] + max(1, power // _STEPS)))
    return rows


def issue_products(decoder: Decoder, rows: int, stream: Stream) -> None:
    """Multiplies `rows` rows by the head's weights, and by the first layer's, whose shapes all layers have; where
    layers are quantised differently, by the first ones of each kind."""
    workspace, weights = decoder.workspace, decoder.weights
    activations, count = workspace.activations.first(rows), min(rows, len(workspace.logits))
    first: dict[tuple[Any, ...], Linear | QuantizedLinear] = {}
    for layer in weights.layers:
        for group, linear in enumerate(layer.linears):
            quantized = linear.inputs if isinstance(linear, QuantizedLinear) else None
            first.setdefault((group, linear.weight.dtype, quantized), linear)

    def issue() -> None:
        for (group, *_), linear in first.items():
            linear.apply(activations.inputs[group], activations.outputs[group], workspace.rounded)
        weights.head.apply(workspace.wanted[:count], workspace.logits[:count])

    decoder.driver.run(stream, issue)


def issue_planned(
    decoder: Decoder,
    prefill: FlashInferPrefill,
    capacity: Capacity,
    table: Ints,
    flush: Callable[[], None],
    stream: Stream,
) -> None:
    """Attends with a chunk by FlashInfer, with each window and in each turn, which all take a little memory at their
    first plan. FlashInfer compiles a kernel, or loads it, when it is first planned. `table`: see
    `FlashInferPrefill.plan`; no request may have a slot yet. `flush` issues what a plan sends. Raises ConfigError if a
    kernel cannot be compiled."""
    if min(capacity.tokens, table.shape[1] * BLOCK_TOKENS) < LEAST_TOKENS:
        return  # no batch will be planned
    row = ScheduledRow(0, 0, LEAST_TOKENS, BASE_ADAPTER_SLOT, samples=False)
    shape = PassShape(LEAST_TOKENS, 0, 1, 0, 0, has_items=False, context=0)
    layers = {window: layer for layer, window in enumerate(decoder.windows)}.values()
    for _ in range(prefill.sets):
        try:
            planned = prefill.plan((row,), table)
        except (OSError, RuntimeError) as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(
                f"--attention-backend flashinfer: its kernels cannot be compiled ({first}); it needs nvcc and a "
                "C++ compiler, or its package of compiled kernels, flashinfer-jit-cache"
            ) from error
        flush()
        steps = decoder.make_pass(shape, planned=planned)
        for layer in layers:
            steps.attend(layer, stream)
