"""`caraserve adapter`: says what an adapter's folder holds and what of it would be served, and converts it to PEFT's
files."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from caraserve.errors import AdapterRejected, CaraServeError, ConfigError
from caraserve.lora.adapter_tensors import TensorSource
from caraserve.lora.base_copies import check_copies
from caraserve.lora.folder_contents import GGUF_SUFFIX, MISTRAL_NAMES, TORCH_NAME, files_of, why_no_adapter
from caraserve.lora.image_writer import TensorLayout
from caraserve.lora.peft import inspect_adapter, opened, specify
from caraserve.lora.peft_config import load_fields
from caraserve.lora.peft_fields import CONFIG_NAME, Fields, shown
from caraserve.lora.peft_writer import write_adapter
from caraserve.lora.writers import mlx, open_file
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.families import load_plan
from caraserve.model.opened_file import TensorFileError
from caraserve.model.plan import DecoderPlan
from caraserve.model.safetensors_reader import weight_files
from caraserve.util.units import human_bytes

_WIDTH = 10  # of the first column
# Fields that say what kind of adapter it is, each shown if it has a value.
_METHOD = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "use_bdlora", "use_qalora"),
    *("fine_tune_type", "task_type"),
)
_MOST_COPIES, _MOST_SCALES = 5, 5  # that are named


def inspect(folder: Path, model: Path | None) -> Iterator[str]:
    """Yields lines on what a folder holds and, with a base model, on what of it is applied. Raises ConfigError, and
    AdapterRejected for an adapter that cannot be served, after the lines before."""
    files = _files(folder)
    fields: Fields = {}
    if not files[-1].endswith(GGUF_SUFFIX):
        fields = load_fields(folder / files[0])
    num_bytes = sum((folder / name).stat().st_size for name in files)
    yield _line("files", f"{', '.join(files)} ({human_bytes(num_bytes)}), as {_writer(files, fields)} writes them")
    method = [f"{field} {shown(fields[field])}" for field in _METHOD if fields.get(field)]
    if method:
        yield _line("method", ", ".join(method))
    if fields.get("base_model_name_or_path"):
        yield _line("base", shown(fields["base_model_name_or_path"]))
    try:
        with open_file(folder) as file:
            yield _line("tensors", _tensors(file))
        if model is not None:
            plan, base = _model(model)
            yield _line("served on", f"{plan.family}, weights in {plan.format_names()}")
            yield from _applied(folder, plan, base)
    except TensorFileError as error:
        raise AdapterRejected(str(error)) from None


def _applied(folder: Path, plan: DecoderPlan, base: BaseTensors | None) -> Iterator[str]:
    """Yields lines on what the base model is changed by."""
    with opened(folder, plan) as adapter:
        layout = specify(adapter, plan, base)
        yield _line("applied", _modules(layout, plan))
        for note in layout.notes:
            yield _line("left out", note)
        check_copies(layout.copies, layout.file, base)
        names = [copy.saved.stored for copy in layout.copies]
        if names:
            more = f" and {len(names) - _MOST_COPIES} others" if len(names) > _MOST_COPIES else ""
            yield _line("left out", f"{', '.join(names[:_MOST_COPIES])}{more}: the same as in the base model")
    spec = inspect_adapter(folder, plan, base)
    yield _line("served as", f"{human_bytes(spec.num_bytes)} in {spec.dtype.name}, digest {spec.digest}")


def convert(source: Path, target: Path, model: Path) -> Iterator[str]:
    """Writes an adapter to a new folder as PEFT's files, and yields lines on it. Raises ConfigError, and
    AdapterRejected; then nothing is written."""
    _files(source)
    plan, base = _model(model)
    notes: list[str] = []
    inspect_adapter(source, plan, base, notes.append)
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{str(target)!r} cannot be made: {error.strerror}") from None
    try:
        with opened(source, plan) as adapter:
            write_adapter(specify(adapter, plan, base), adapter.fields, target)
        spec = inspect_adapter(target, plan, base)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise CaraServeError(f"{str(target)!r} cannot be written: {error.strerror}") from None
        raise
    for note in notes:
        yield _line("left out", note)
    yield _line("written", f"{str(target)!r}: {', '.join(spec.targets)}, rank {spec.rank}, digest {spec.digest}")


def _line(what: str, text: str) -> str:
    return f"{what:{_WIDTH}}{text}"


def _files(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        hint = "; give the folder that it is in" if folder.exists() else ""
        raise ConfigError(f"{str(folder)!r} is not a folder{hint}")
    try:
        if files := files_of(folder):
            return files
        raise AdapterRejected(f"{str(folder)!r}: {why_no_adapter(folder)}")
    except OSError as error:
        raise AdapterRejected(f"{str(folder)!r} cannot be read: {error.strerror}") from None


def _writer(files: tuple[str, ...], fields: Fields) -> str:
    if files[-1].endswith(GGUF_SUFFIX):
        return "llama.cpp"
    if files == MISTRAL_NAMES:
        return "mistral-finetune"
    if files[0] == CONFIG_NAME and mlx.wrote(fields):
        return "MLX"
    return "PEFT without safetensors" if files[-1] == TORCH_NAME else "PEFT"


def _tensors(file: TensorSource) -> str:
    kinds: Counter[str] = Counter()
    for name in file.names:
        try:
            kinds[file.dtype(name).name] += 1
        except TensorFileError:
            kinds["other types"] += 1
    return f"{len(file.names)}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"


def _model(folder: Path) -> tuple[DecoderPlan, BaseTensors | None]:
    """Returns the plan and the tensors of a base model; None for these if the folder has no weights."""
    plan = load_plan(folder)
    try:
        weight_files(folder)
    except TensorFileError:
        return plan, None
    return plan, BaseTensors(folder, plan)


def _modules(layout: TensorLayout, plan: DecoderPlan) -> str:
    layers = {layer for layer, _ in layout.modules}
    changes = [one.change for one in layout.vocabulary]
    sizes = [(one.rank, one.scale) for one in layout.modules.values()]
    sizes += [(one.rank, one.scale) for one in changes if one.rank]
    targets = [target for target in layout.spec.targets if target in plan.targets]
    texts = [f"{', '.join(targets)} in {len(layers)} of {len(plan.layers)} layers"] if layers else []
    texts += [target for target in layout.spec.targets if target not in targets]
    if sizes:
        texts.append(f"rank {', '.join(map(str, sorted({rank for rank, _ in sizes})))}")
        texts.append(
            f"scale {', '.join(f'{scale:.6g}' for scale in sorted({scale for _, scale in sizes})[:_MOST_SCALES])}"
        )
    texts += [f"{len(one.tokens)} rows of the {one.side}" for one in changes if one.tokens]
    if layout.spec.head is not None:
        texts.append(f"a score head of {len(layout.spec.head.classes)} classes")
    if layout.spec.invocation:
        texts.append(f"from {len(layout.spec.invocation)} invocation tokens on")
    return "; ".join(texts)
