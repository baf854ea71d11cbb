"""The folders of `scripts/k8s` come to the same with kubectl's kustomize and with the tests' own."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s.kustomize import Document, build

FOLDER = Path(__file__).parents[2] / "scripts" / "k8s"
FOLDERS = ("overlays/kind", "overlays/all")  # with the base and all components


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", FOLDERS)
def test_kubectl_builds_the_same(name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "k8s")
    (tmp_path / "k8s" / "base" / "cluster-secret").write_text("secret\n")
    command = ["kubectl", "kustomize", str(tmp_path / "k8s" / name)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = list(yaml.safe_load_all(re.sub(r"\b(caraserve-\w+)-[a-z0-9]{10}\b", r"\1", text)))
    built = build(FOLDER / name)
    ours = {key(document): document for document in built.documents}
    generated = {
        *((kind, name) for kind, names in (("ConfigMap", built.options), ("Secret", built.secrets)) for name in names)
    }
    assert {key(document) for document in theirs} == ours.keys() | generated
    for document in theirs:
        assert document["metadata"]["namespace"] == "caraserve"
        if key(document) in ours:
            document["metadata"].pop("labels", None)  # of the base, which no test reads
            mine = ours[key(document)] | {"metadata": {**ours[key(document)]["metadata"]}}
            mine["metadata"].pop("labels", None)
            assert document == mine
        elif built.options.get(document["metadata"]["name"]):
            assert document["data"] == built.options[document["metadata"]["name"]]


def key(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]
