"""Runs one stage in this process: `python -m scripts.laboratory.gpu --stage NAME --folder DIR --budget-s S`.

DIR holds the figures of earlier stages in `known.json`; the stage's report is written to `report.json` there.
processes.py starts these processes.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from caraserve.gpu.driver.environment import prepare_environment
from scripts.laboratory.gpu.processes import KNOWN, REPORT, Known
from scripts.laboratory.gpu.results import Outcome, StageReport, WrongResult
from scripts.laboratory.gpu.setup import CheckSetup, MakeSetup, known_limits, real_setup
from scripts.laboratory.gpu.stages import Stage, find_stage


def main(make_setup: MakeSetup = real_setup) -> int:
    """Runs the stage and writes its report. Returns exit code 0 whenever there is a report, also of a failure."""
    parser = argparse.ArgumentParser(prog="scripts.laboratory.gpu")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--module-loading", help="value of CUDA_MODULE_LOADING, instead of this project's")
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("server", nargs="*", help="more arguments of `caraserve bench modes`")
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    prepare_environment()
    if args.module_loading:
        os.environ["CUDA_MODULE_LOADING"] = args.module_loading
    limits = known_limits(msgspec.json.decode((args.folder / KNOWN).read_bytes(), type=Known))
    report = run_stage(
        find_stage(args.stage),
        lambda: make_setup(args.folder, args.budget_s, limits, tuple(args.server), is_smoke=args.smoke),
    )
    # Written under another name and renamed when complete: the parent never reads half a report.
    made = args.folder / f"{REPORT}.new"
    made.write_bytes(msgspec.json.encode(report))
    made.replace(args.folder / REPORT)
    return 0


def run_stage(stage: Stage, setup: Callable[[], CheckSetup]) -> StageReport:
    """Runs a stage and returns its report; of an exception, the report has one sentence and stderr the traceback."""
    try:
        result = stage.run(setup())
    except WrongResult as error:
        return StageReport(Outcome.WRONG, _sentence(error))
    except Exception as error:
        traceback.print_exc()
        return StageReport(Outcome.FAILED, f"{type(error).__name__}: {_sentence(error)}")
    return StageReport(Outcome.DONE, "", msgspec.to_builtins(result.figures, str_keys=True), result.lines)


def _sentence(error: Exception) -> str:
    """Returns the first line of an error's message; libraries append whole logs."""
    return next(iter(str(error).strip().splitlines()), "it says nothing")


if __name__ == "__main__":
    sys.exit(main())
