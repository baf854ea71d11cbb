"""The sizes of passes: the largest batch of a lane, and the part of its arrays that one pass reads."""

from dataclasses import dataclass

from caraserve.gpu.kernels.lora import most_segments
from caraserve.model.plan import DecoderPlan

_LOGITS_ROWS = 256


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest batch of a lane."""

    tokens: int
    rows: int
    outputs: int
    tile_tokens: int  # most tokens per tile of prefill attention
    adapters: int  # most different adapters per batch
    averages: bool = False  # whether the hidden states of all tokens may be wanted, or only those of rows' last ones

    @property
    def embedded(self) -> int:
        """Tokens whose hidden states may be wanted."""
        return self.tokens if self.averages else self.rows

    @property
    def logits_rows(self) -> int:
        """Outputs whose logits are in memory at a time."""
        return min(self.outputs, _LOGITS_ROWS)

    @property
    def tiles(self) -> int:
        return self.tokens // self.tile_tokens + min(self.rows, self.tokens)

    @property
    def segments(self) -> int:
        return most_segments(self.tokens, min(self.adapters, self.rows))


@dataclass(frozen=True, slots=True)
class PassShape:
    """The part of the batch's arrays that a pass reads: exactly the batch for a pass that is launched kernel by kernel,
    a bucket's size for a captured one."""

    tokens: int  # activations are [tokens, …]
    decode_rows: int  # entries of `row_token`; 0: no row decodes
    tiles: int  # entries of `tile_first`; 0: no prompt chunks
    outputs: int  # tokens whose logits are wanted
    segments: int  # entries of `segments`; 0: no prompt chunk has an adapter, and no adapter has many decoding rows
    has_items: bool  # True if other rows that decode have adapters
    context: int  # most positions of any row that decodes
    groups: frozenset[int]  # shapes of the groups in which any adapter of the batch has a module
    changes_vocabulary: bool = False  # True if an adapter of the batch changes the embedding or the head

    @property
    def has_lora(self) -> bool:
        return self.has_items or self.segments > 0

    def fits(self, larger: "PassShape") -> bool:
        """True if a pass of shape `larger` can compute a batch of this shape, padded."""
        sizes = ("tokens", "decode_rows", "tiles", "outputs", "segments", "has_items", "context", "changes_vocabulary")
        fits = all(getattr(self, name) <= getattr(larger, name) for name in sizes)
        return fits and (not self.has_lora or self.groups <= larger.groups)


def all_groups(plan: DecoderPlan) -> frozenset[int]:
    """Returns all group shapes, as indices of `plan.group_shapes`."""
    return frozenset(range(len(plan.group_shapes)))
