"""What runs once before serving, so that no kernel is compiled or loaded while requests wait; and the count of those
that are.

Triton compiles a kernel again for other alignments of its pointers and for some values of its sizes. cuBLAS has many
kernels for one product, loads each at its first use, and chooses among them by the number of rows; so do the products
of experts among their tiles. The kernels of a graph run before it is captured; passes that are launched kernel by
kernel may have any number of rows.
"""

import logging
from collections.abc import Hashable
from typing import Any

from triton import knobs

from caraserve.gpu.driver.api import Stream
from caraserve.gpu.forward.decoder import BlockSteps, Decoder
from caraserve.gpu.linear.base import Linear
from caraserve.gpu.memory.pass_shape import Capacity, PassShape

log = logging.getLogger(__name__)

_STEPS = 16  # to each doubling of rows: where cuBLAS' choice changes is not documented


def warm_up_shapes(capacity: Capacity, max_context: int, groups: frozenset[int]) -> list[PassShape]:
    """Returns shapes of passes, with LoRA in `groups`, that cover the kernels' variants: Triton specialises on the size
    1 and on multiples of 16."""
    shapes = []
    for tokens in (1, 2, 16):
        if tokens <= capacity.tokens:
            rows, outputs, segments = (
                min(tokens, capacity.rows),
                min(tokens, capacity.outputs),
                min(1, capacity.segments),
            )
            shapes.append(PassShape(tokens, rows, 1, outputs, segments, True, max_context, groups, True))
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
    """Multiplies `rows` rows by the head's weights, by the first linear of each group shape and kernels, and by the
    first experts of each kind; the batch must have no rows."""
    workspace, weights = decoder.workspace, decoder.weights
    activations, count = workspace.activations.first(rows), min(rows, len(workspace.logits))
    first: dict[tuple[int, Hashable], Linear] = {}
    for layer, shapes in zip(weights.layers, decoder.plan.shapes_of_groups, strict=True):
        for linear, shape in zip(layer.linears, shapes, strict=True):
            first.setdefault((shape, linear.kernels), linear)

    steps = decoder.make_pass(PassShape(rows, 0, 0, 0, 0, has_items=False, context=0, groups=frozenset()))
    for block in _first_experts(decoder):
        steps.add_experts(block, stream)

    def issue() -> None:
        for (shape, _), linear in first.items():
            linear.apply(activations.inputs[shape], activations.outputs[shape], workspace.room)
        weights.head.apply(workspace.wanted[:count], workspace.logits[:count], workspace.room)

    decoder.driver.run(stream, issue)


def _first_experts(decoder: Decoder) -> list[BlockSteps]:
    """Returns the first block of those whose experts have the same kernels and find their inputs alike."""
    first: dict[Hashable, BlockSteps] = {}
    shapes = decoder.plan.shapes_of_groups
    for block in (block for blocks in decoder.blocks for block in blocks):
        if block.weights.experts is not None:
            at = shapes[block.layer][block.first.index], block.last is None
            first.setdefault((at, block.weights.experts.kernels), block)
    return list(first.values())


class LateKernels:
    """Counts and logs Triton kernels that are compiled or loaded while serving: each delays all requests.

    Triton has one hook in a process, which belongs to the last object that watches."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        """Reports kernels from now on."""
        knobs.runtime.jit_post_compile_hook = self._report

    def stop(self) -> None:
        """Reports no more kernels."""
        if knobs.runtime.jit_post_compile_hook == self._report:
            knobs.runtime.jit_post_compile_hook = None

    def _report(self, *, repr: str, **_: Any) -> None:  # noqa: A002  the name that Triton gives it
        """Called by Triton on the thread that launches, with the kernel's name, options and types of arguments."""
        self.count += 1
        log.error("a kernel was compiled or loaded while requests waited; the warm-up lacks this form of it: %s", repr)
