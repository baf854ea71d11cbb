"""The results of a device as one JSON file, which later runs add to."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caraserve.bench.records import commit, today
from caraserve.gpu.driver.detect import Gpu
from scripts.laboratory.gpu.results import Outcome, StageReport

RESULTS = Path("scripts/bench/results")
_SCHEMA = 3
_DRIVER = Path("/sys/module/nvidia/version")  # of the kernel module


def file_name(check: str, device: str) -> str:
    """Returns the name of the file for a device with this name; `check` is a word for what was run."""
    words = re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", ""))
    return f"gpu_{check}_{'_'.join(words)}.json"


def origin(gpu: Gpu) -> dict[str, str]:
    """Returns where and when results are made: the card, its driver, the commit, the date."""
    driver = _DRIVER.read_text().strip() if _DRIVER.exists() else ""
    cuda = f"CUDA {gpu.driver_version // 1000}.{gpu.driver_version % 1000 // 10}"
    return {
        "device": gpu.name,
        "driver": f"{driver} ({cuda})" if driver else cuda,
        "commit": commit() or "unknown",
        "date": today(),
    }


class ResultsFile:
    """One entry for each stage. A stage that is run again replaces its own entry and no other, one that is not begun
    replaces none."""

    def __init__(self, path: Path, made: Mapping[str, str]) -> None:
        """`made`: where and when results are made that are added. Entries of an older form are not kept. Raises
        ValueError for a damaged file."""
        self.path, self._made = path, made
        self._stages: dict[str, Any] = {}
        if path.exists():
            self._stages = _stages_in(path)

    def add(self, name: str, report: StageReport, spent_s: float) -> None:
        """Adds a stage and writes the file. Another file is renamed, so that a reader never finds half of it."""
        if report.outcome is Outcome.NOT_BEGUN and name in self._stages:
            return
        self._stages[name] = {
            **self._made,
            "s": round(spent_s, 1),
            "outcome": report.outcome,
            "error": report.error,
            "figures": report.figures,
            "lines": [[line.what, line.value, line.target, line.met] for line in report.lines],
        }
        document = {"check": "gpu", "schema": _SCHEMA, "stages": self._stages}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_name(f"{self.path.name}.new")
        made.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        made.replace(self.path)


def _stages_in(path: Path) -> dict[str, Any]:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, remove it or repair it: {error}") from None
    if not isinstance(before, dict) or not isinstance(stages := before.get("stages"), dict):
        raise ValueError(f"{path} is damaged, remove it or repair it: it has no stages")
    return stages if before.get("schema") == _SCHEMA else {}
