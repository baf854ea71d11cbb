"""Runs one stage in this process: `python -m caraserve.bench.gpu --stage NAME --folder DIR --budget-s S`.

DIR holds the figures of earlier stages in `known.json`; the stage's report is written to `report.json` there. run.py
starts these processes.
"""

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from caraserve.bench.gpu.results import WrongResult
from caraserve.bench.gpu.run import Stage, StageReport, parse_stages
from caraserve.bench.gpu.setup import CheckSetup, real_setup
from caraserve.gpu.driver.environment import prepare_environment


def main() -> int:
    """Runs the stage and writes its report. Returns exit code 0 whenever there is a report, also of a failure."""
    parser = argparse.ArgumentParser(prog="caraserve.bench.gpu")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("server", nargs="*", help="more arguments of `caraserve bench modes`")
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    prepare_environment()
    (stage,) = parse_stages(args.stage)
    known = json.loads((args.folder / "known.json").read_text(encoding="utf-8"))
    report = run_stage(stage, lambda: real_setup(args.folder, args.budget_s, known, tuple(args.server)))
    # Written under another name and renamed when complete: the parent never reads half a report.
    made = args.folder / "report.json.new"
    made.write_text(report.to_json(), encoding="utf-8")
    made.replace(args.folder / "report.json")
    return 0


def run_stage(stage: Stage, setup: Callable[[], CheckSetup]) -> StageReport:
    """Runs a stage and returns its report; any exception becomes the report's `error`."""
    try:
        result = stage.run(setup())
    except WrongResult as error:
        return StageReport(error=f"WRONG: {error}")
    except Exception as error:
        return StageReport(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return StageReport(result.figures, tuple(result.lines))


if __name__ == "__main__":
    sys.exit(main())
