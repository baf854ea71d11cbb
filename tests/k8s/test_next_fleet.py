"""The commands that start a second fleet beside the first, with another base model."""

import re
import shutil
import subprocess
from pathlib import Path

from caraserve.cli.main import _parser
from tests.k8s.kustomize import build, documents

FOLDER = Path(__file__).parents[2] / "scripts" / "k8s"


def commands() -> list[str]:
    section = (FOLDER / "README.md").read_text(encoding="utf-8").partition("\n## Another base model\n")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def test_the_new_fleet_has_a_namespace_and_a_cluster_of_its_own_and_is_otherwise_the_same(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "scripts" / "k8s")
    here = [command for command in commands() if not command.startswith("kubectl ")]
    subprocess.run(["bash", "-euc", "\n".join(here)], cwd=tmp_path, check=True)
    (config,) = documents(tmp_path / "next" / "kustomization.yaml")
    assert config["namespace"] == "caraserve-next"
    old, new = build(FOLDER), build(tmp_path / "next")
    (container,) = new.one("StatefulSet")["spec"]["template"]["spec"]["containers"]
    values = [argument.replace("$(POD_NAME)", "caraserve-0") for argument in container["args"]]
    assert _parser().parse_args(values).cluster_name == "next"
    container["args"].remove("--cluster-name=next")
    assert new.documents == old.documents


def test_it_is_ready_before_the_old_one_ends() -> None:
    there = [command for command in commands() if command.startswith("kubectl ")]
    assert [command.split()[1:4] for command in there] == [
        ["create", "namespace", "caraserve-next"],
        ["apply", "-k", "next"],
        ["-n", "caraserve-next", "rollout"],
        ["-n", "caraserve", "delete"],
    ]
