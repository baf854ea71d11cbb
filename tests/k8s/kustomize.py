"""As much of kustomize as `scripts/k8s` uses: resources, components, JSON patches, generators, namespaces, images.

It refuses the rest. `test_kustomize.py` compares it with kubectl's own.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

_KEYS = {"apiVersion", "kind", "resources", "components", "patches", "namespace", "labels", "images"}
_KEYS |= {"secretGenerator", "configMapGenerator"}


@dataclass
class Built:
    """What a folder comes to. `secrets`, `config_maps`: generated, with their files. `options`: the maps' literals."""

    documents: list[Document] = field(default_factory=list)
    secrets: dict[str, list[str]] = field(default_factory=dict)
    config_maps: dict[str, list[Path]] = field(default_factory=dict)
    options: dict[str, dict[str, str]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str, name: str = "caraserve") -> Document:
        (document,) = [document for document in self.of(kind) if document["metadata"]["name"] == name]
        return document


def build(folder: Path, into: Built | None = None) -> Built:
    built = into or Built()
    (config,) = documents(folder / "kustomization.yaml")
    assert config.keys() <= _KEYS, f"{folder.name}: {config.keys() - _KEYS} is not understood here"
    for resource in config.get("resources", ()):
        path = folder / resource
        if path.is_dir():
            build(path, built)
        else:
            built.documents += documents(path)
    for component in config.get("components", ()):
        build(folder / component, built)
    for generator in config.get("secretGenerator", ()):
        built.secrets[generator["name"]] = list(generator["files"])
    for generator in config.get("configMapGenerator", ()):
        _generate(built, folder, generator)
    for patch in config.get("patches", ()):
        target = built.one(patch["target"]["kind"], patch["target"]["name"])
        for change in yaml.safe_load(patch["patch"]):
            _change(target, change)
    for document in built.documents:
        if "namespace" in config:
            document["metadata"]["namespace"] = config["namespace"]
            for subject in document.get("subjects", ()):
                subject["namespace"] = config["namespace"]
    for image in config.get("images", ()):
        _tag(built, image["name"], image["newTag"])
    return built


def documents(path: Path) -> list[Document]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]


def pod_of(workload: Document) -> Document:
    """Returns the specification of a workload's pods."""
    pod: Document = workload["spec"]["template"]["spec"]
    return pod


def containers_of(workload: Document) -> list[Document]:
    """Returns the containers of a workload's pods, those that run first at the front."""
    pod = pod_of(workload)
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _generate(built: Built, folder: Path, generator: Document) -> None:
    name, literals = generator["name"], dict(one.split("=", 1) for one in generator.get("literals", ()))
    if generator.get("behavior") == "merge":
        assert "files" not in generator, "merged files are not understood here"
        built.options[name] |= literals
        return
    assert name not in built.config_maps
    built.config_maps[name] = [folder / file for file in generator.get("files", ())]
    built.options[name] = literals


def _tag(built: Built, name: str, tag: str) -> None:
    for workload in (*built.of("StatefulSet"), *built.of("Deployment")):
        for container in containers_of(workload):
            if container["image"].partition(":")[0] == name:
                container["image"] = f"{name}:{tag}"


def _change(document: Document, change: Document) -> None:
    """RFC 6902's `replace`, and its `add` of a field, or to the end of a list."""
    assert change["op"] in ("add", "replace"), f"{change['op']} is not understood here"
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].removeprefix("/").split("/")]
    here: Any = document
    for part in way:
        here = here[int(part)] if isinstance(here, list) else here[part]
    assert change["op"] == "add" or last in here, f"{change['path']} is not there"
    if last == "-":
        here.append(copy.deepcopy(change["value"]))
    else:
        here[last] = copy.deepcopy(change["value"])
