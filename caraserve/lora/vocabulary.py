"""The tensors by which a PEFT adapter changes the embedding and the head: LoRA of either, and replaced rows.

    lm_head.lora_A.weight [rank, hidden], lm_head.lora_B.weight [vocab, rank]       scale · B A
    embed_tokens.lora_embedding_A [rank, vocab], .lora_embedding_B [hidden, rank]   scale · B A; tokens are A's columns
    embed_tokens.token_adapter.trainable_tokens_delta [tokens, hidden]              the new rows, in place of the base's
    lm_head.weight, embed_tokens.weight                                             all rows; those that differ are kept

Where the base's head is tied to its embedding, LoRA and whole matrices change only the side in whose module they are,
and trained tokens change both sides.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from caraserve.core.lora_layout import (
    MAX_ROWS,
    Array,
    Bytes,
    Module,
    VocabularyChange,
    VocabularySpan,
    place_a,
    place_b,
    stored_columns,
)
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.base_copies import BaseCopy
from caraserve.lora.peft_config import TRAINED_TOKENS, PeftConfig
from caraserve.lora.peft_fields import refusal, shown
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.model.vocabulary import Side, vocabulary_modules, vocabulary_targets
from caraserve.util.units import human_bytes

_ADAPTER = r"(?P<adapter>(?:\.[A-Za-z0-9_-]+)?)"
_NAMES = (
    re.compile(rf"(?P<module>.+?)\.(?P<tensor>lora_[AB]){_ADAPTER}\.weight"),
    re.compile(rf"(?P<module>.+?)\.(?P<tensor>lora_embedding_[AB]){_ADAPTER}"),
    re.compile(rf"(?P<module>.+?)\.token_adapter\.(?P<tensor>trainable_tokens_delta){_ADAPTER}"),
)
_LORA: dict[Side, tuple[str, str]] = {
    "embedding": ("lora_embedding_A", "lora_embedding_B"),
    "head": ("lora_A", "lora_B"),
}
_ROWS = "trainable_tokens_delta"


@dataclass(frozen=True, slots=True)
class ChangedMatrix:
    """A change of the embedding or the head, and the tensors with its values: A and B, or the rows."""

    change: VocabularyChange
    module: str  # in the file
    tensors: tuple[str, ...]  # names in the file
    is_picked: bool = False  # whether the new rows are those of their tokens in a whole matrix


def vocabulary_tensor(name: str, plan: DecoderPlan) -> tuple[str, str] | None:
    """Returns the module of a tensor and its name in it, if it is of the embedding or the head; `name`: without PEFT's
    prefix."""
    match = next((found for one in _NAMES if (found := one.fullmatch(name))), None)
    if match is None or (side := vocabulary_modules(plan).get(match["module"])) is None:
        return None
    return (match["module"], match["tensor"]) if match["tensor"] in (*_LORA[side], _ROWS) else None


def is_whole_matrix(copy: BaseCopy, plan: DecoderPlan) -> bool:
    """Returns whether a tensor replaces the embedding or the head (`modules_to_save`)."""
    module, _, tensor = copy.saved.name.rpartition(".")
    return not copy.saved.is_original and tensor == "weight" and module in vocabulary_modules(plan)


def differing_rows(
    copies: Iterable[BaseCopy], file: AdapterTensors, config: PeftConfig, plan: DecoderPlan, base: BaseTensors
) -> list[ChangedMatrix]:
    """Compares whole matrices with the base model's, and returns those with other rows. Raises AdapterRejected for too
    many, and TensorFileError."""
    found: list[ChangedMatrix] = []
    for copy in copies:
        stored, module = copy.saved.stored, copy.saved.name.rpartition(".")[0]
        tokens = base.changed_rows(copy.base, partial(file.rows, stored), file.dtype(stored)).tolist()
        if len(tokens) > MAX_ROWS:
            size = human_bytes(file.dtype(stored).itemsize * len(tokens) * plan.hidden)
            raise AdapterRejected(
                f"{file.name}: {stored} replaces {len(tokens)} rows ({size}) of the base; at most {MAX_ROWS} changed "
                f"rows are kept. Train {module.rpartition('.')[2]} as a LoRA target or use {TRAINED_TOKENS}"
            )
        if tokens and plan.head is None and not any(map(module.endswith, config.saved)):
            # peft would load it into the one matrix that both sides have.
            raise AdapterRejected(f"{stored} differs from the base model's; the adapter belongs to another base")
        if tokens:
            change = VocabularyChange(vocabulary_modules(plan)[module], tokens=tuple(tokens))
            found.append(ChangedMatrix(change, module, (stored,), is_picked=True))
    return found


def vocabulary_of(
    file: AdapterTensors,
    modules: Mapping[str, Mapping[str, str]],
    whole: Iterable[ChangedMatrix],
    config: PeftConfig,
    plan: DecoderPlan,
) -> list[ChangedMatrix]:
    """Returns all changes of the embedding and the head, the former first. `modules`: their tensors, by module and by
    the names in it; `whole`: changes by whole matrices. Raises AdapterRejected if one lacks tensors, or cannot be
    applied, and TensorFileError."""
    found = list(whole)
    for module, tensors in modules.items():
        if _ROWS in tensors:
            found += _rows_of(file, module, tensors[_ROWS], config, plan)
        if len(tensors) > (_ROWS in tensors):
            found.append(_lora_of(file, module, tensors, config, plan))
    for module, side in vocabulary_modules(plan).items():
        is_there = any(one.change.side == side and one.change.rank for one in found)
        if not is_there and config.requires(-1, module):
            raise refusal("target_modules", f"covers {module}, but {file.name} has no tensors for it")
    if config.tokens and not any(_ROWS in tensors for tensors in modules.values()):
        raise refusal(TRAINED_TOKENS, f"is set, but {file.name} has no {_ROWS}")
    _refuse_combinations(found, config, plan)
    return sorted(found, key=lambda one: one.change.side)


def _lora_of(
    file: AdapterTensors, module: str, tensors: Mapping[str, str], config: PeftConfig, plan: DecoderPlan
) -> ChangedMatrix:
    side = vocabulary_modules(plan)[module]
    names = _LORA[side]
    if missing := [name for name in names if name not in tensors]:
        raise AdapterRejected(f"tensor {next(iter(tensors.values()))} has no {missing[0]} beside it")
    a, b = (tensors[name] for name in names)
    if not config.covers(-1, module):
        raise AdapterRejected(f"tensor {a}: adapter_config.json does not target this module")
    if config.kind.switch is not None or config.kind.peft_type != "LORA":
        raise AdapterRejected(f"tensor {a}: only plain LoRA may change {module}")
    rank = config.kind.rank(module)
    inputs, outputs = (plan.vocab_size, plan.hidden) if side == "embedding" else (plan.hidden, plan.vocab_size)
    for name, expected in ((a, (rank, inputs)), (b, (outputs, rank))):
        if (shape := file.shape(name)) != expected:
            raise AdapterRejected(
                f"tensor {name} has shape {list(shape)}; rank {rank} on this base model needs {list(expected)}"
            )
    return ChangedMatrix(VocabularyChange(side, rank, config.kind.scale(module)), module, (a, b))


def _rows_of(
    file: AdapterTensors, module: str, name: str, config: PeftConfig, plan: DecoderPlan
) -> list[ChangedMatrix]:
    side = vocabulary_modules(plan)[module]
    tokens = _trained_tokens(module, config.tokens, plan)
    if (shape := file.shape(name)) != (len(tokens), plan.hidden):
        raise AdapterRejected(
            f"tensor {name} has shape {list(shape)}; {TRAINED_TOKENS} on this base model need "
            f"{[len(tokens), plan.hidden]}"
        )
    if plan.head is not None:
        return [ChangedMatrix(VocabularyChange(side, tokens=tokens), module, (name,))]
    if side == "head":
        raise AdapterRejected(f"tensor {name}: the base model's head has the embedding's weights; train those tokens")
    return [ChangedMatrix(VocabularyChange(each, tokens=tokens), module, (name,)) for each in _LORA]


def _trained_tokens(module: str, value: Any, plan: DecoderPlan) -> tuple[int, ...]:
    """Returns the tokens that `trainable_token_indices` names for a module: a list is of the embedding's."""
    target = module.rpartition(".")[2]
    if isinstance(value, list):
        value = {vocabulary_targets(plan)["embedding"]: value}
    listed = value.get(module, value.get(target)) if isinstance(value, dict) else None
    if not isinstance(listed, list) or not all(type(token) is int for token in listed):
        raise refusal(TRAINED_TOKENS, f"is {shown(value)}; a list of tokens of {target} is needed")
    if not 0 < len(listed) <= MAX_ROWS:
        raise refusal(TRAINED_TOKENS, f"has {len(listed)} tokens of {target}; 1 to {MAX_ROWS} are supported")
    if len(set(listed)) != len(listed):
        raise refusal(TRAINED_TOKENS, f"is {shown(listed)}, which has a token twice")
    if outside := [token for token in listed if not 0 <= token < plan.vocab_size]:
        raise refusal(TRAINED_TOKENS, f"has {outside[0]}; the base model has the tokens 0 to {plan.vocab_size - 1}")
    return tuple(listed)


def _refuse_combinations(found: Sequence[ChangedMatrix], config: PeftConfig, plan: DecoderPlan) -> None:
    sides = [one.change.side for one in found]
    if twice := [side for side in _LORA if sides.count(side) > 1]:
        target = vocabulary_targets(plan)[twice[0]]
        raise AdapterRejected(f"{target} has LoRA and replaced rows; only one of the two is supported")
    if "head" in sides and plan.has_unit_head_rows:
        raise AdapterRejected("the base model divides the rows of its head by their lengths; they cannot be changed")
    if found and config.invocation:
        raise refusal("alora_invocation_tokens", "is set; activated LoRA of the embedding or the head is not supported")


class VocabularyWriter:
    """Writes the changes of an adapter into its image. A change is named like a module: (layer, -1 - number), with the
    layer with which it is loaded."""

    def __init__(
        self,
        file: AdapterTensors,
        matrices: Sequence[ChangedMatrix],
        spans: Sequence[VocabularySpan],
        plan: DecoderPlan,
    ) -> None:
        """`matrices`: in the order of the spans."""
        self._file, self._plan = file, plan
        self._changes = dict[Module, tuple[ChangedMatrix, VocabularySpan]]()
        for number, (matrix, span) in enumerate(zip(matrices, spans, strict=True)):
            layer = 0 if span.change.side == "embedding" else len(plan.layers) - 1
            self._changes[layer, -1 - number] = matrix, span

    @property
    def modules(self) -> list[Module]:
        """The changes, in the order of the image."""
        return list(self._changes)

    def source(self, module: Module, matrix: str) -> str:
        """Returns the name of the tensor with A or B; both are the rows if rows are replaced."""
        return self._changes[module][0].tensors[-1 if matrix == "B" else 0]

    def rows(self, module: Module) -> tuple[int, ...] | None:
        """Returns the rows of the tensor that are written; None: all."""
        matrix = self._changes[module][0]
        return matrix.change.tokens if matrix.is_picked else None

    def inputs(self, module: Module) -> int:
        """Returns how many numbers other than 0 are multiplied by a row of A."""
        return 1 if self._changes[module][1].change.side == "embedding" else self._plan.hidden

    def change(self, module: Module) -> VocabularyChange:
        """Returns what is changed."""
        return self._changes[module][1].change

    def write(self, module: Module, matrix: str, values: Array, data: Bytes, dtype: Dtype, start: int) -> None:
        """Writes A or B, or the rows in place of A, to `data`, the bytes of the image from `start` on."""
        _, span = self._changes[module]
        if matrix == "B":
            if not span.change.tokens:
                place_b(values, data, span, dtype, start)
        elif span.change.side == "embedding" and span.change.rank:
            stored_columns(data, span, self._plan.vocab_size, dtype, start)[:, : len(values)] = values.T
        else:
            place_a(values, data, span, dtype, start)
