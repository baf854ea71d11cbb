"""As much of kustomize as `scripts/k8s` uses: resources, components, JSON patches, generators. It refuses the rest."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

_KEYS = {"apiVersion", "kind", "resources", "components", "patches", "namespace", "labels", "images"}
_KEYS |= {"secretGenerator", "configMapGenerator"}


@dataclass
class Built:
    """What one folder comes to. `secrets` and `config_maps`: generated, by name, with the files in them."""

    documents: list[Document] = field(default_factory=list)
    secrets: dict[str, list[str]] = field(default_factory=dict)
    config_maps: dict[str, list[Path]] = field(default_factory=dict)

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
        built.config_maps[generator["name"]] = [folder / name for name in generator["files"]]
    for patch in config.get("patches", ()):
        target = built.one(patch["target"]["kind"], patch["target"]["name"])
        for change in yaml.safe_load(patch["patch"]):
            _add(target, change)
    return built


def documents(path: Path) -> list[Document]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]


def _add(document: Document, change: Document) -> None:
    """RFC 6902's `add` of a field, or to the end of a list."""
    assert change["op"] == "add", f"{change['op']} is not understood here"
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].removeprefix("/").split("/")]
    here: Any = document
    for part in way:
        here = here[int(part)] if isinstance(here, list) else here[part]
    if last == "-":
        here.append(change["value"])
    else:
        here[last] = change["value"]
