"""The commands that start a second fleet beside the first, with another base model."""

import os
import re
import subprocess
from pathlib import Path
from unittest.mock import patch

from caraserve.cli.main import _parser
from tests.k8s.kustomize import build, documents

FOLDER = Path(__file__).parents[2] / "scripts" / "k8s"


def block() -> str:
    section = (FOLDER / "README.md").read_text(encoding="utf-8").partition("\n## Another base model\n")[2]
    found = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_new_fleet_has_a_namespace_a_cluster_and_a_model_of_its_own_and_is_otherwise_the_same(
    tmp_path: Path,
) -> None:
    (tmp_path / "scripts").symlink_to(FOLDER.parent)
    here = "".join(line for line in block().splitlines(keepends=True) if not line.startswith("kubectl "))
    subprocess.run(["bash", "-euc", here], cwd=tmp_path, check=True)
    (config,) = documents(tmp_path / "next" / "kustomization.yaml")
    old, new = build(FOLDER / "overlays" / "gpu"), build(tmp_path / "next")
    changed = dict(new.options["caraserve-options"].items() - old.options["caraserve-options"].items())
    assert changed.keys() == {"MODEL", "CARASERVE_CLUSTER_NAME"}
    with patch.dict(os.environ, changed):
        assert _parser().parse_args(["serve"]).cluster_name == "next"
    for document in new.documents:
        assert document["metadata"]["namespace"] == config["namespace"] == "caraserve-next"
        document["metadata"]["namespace"] = "caraserve"
    assert new.documents == old.documents


def test_it_is_ready_before_the_old_one_ends() -> None:
    there = [command for command in block().splitlines() if command.startswith("kubectl ")]
    assert [command.split()[1:4] for command in there] == [
        ["create", "namespace", "caraserve-next"],
        ["apply", "-k", "next"],
        ["-n", "caraserve-next", "rollout"],
        ["-n", "caraserve", "delete"],
    ]
