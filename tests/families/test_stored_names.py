"""Names of tensors in published files that transformers no longer writes."""

from pathlib import Path

from safetensors.numpy import load_file, save_file

from caraserve.model.families import load_plan
from caraserve.model.folder_reader import FolderReader
from tests.families.cases import CASES
from tests.families.model import TOKENS, make
from tests.families.test_families import LIMIT, distance
from tests.plans.executor import Executor


def test_the_published_files_of_gpt_2_have_names_without_a_prefix(tmp_path: Path) -> None:
    made = make(CASES["gpt 2"], tmp_path)
    path = made.folder / "model.safetensors"
    save_file({name.removeprefix("transformer."): each for name, each in load_file(path).items()}, path)
    plan = load_plan(made.folder)
    with FolderReader(made.folder, plan.stored_names) as read:
        assert distance(Executor(plan, read).logits(TOKENS), made.logits) < LIMIT
