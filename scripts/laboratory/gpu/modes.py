"""Stage `modes`: the load of stage `server` in every loading mode."""

from scripts.laboratory.gpu.results import StageResult
from scripts.laboratory.gpu.server import ServerFigures, measure
from scripts.laboratory.gpu.setup import CheckSetup


def modes(setup: CheckSetup) -> StageResult[ServerFigures]:
    """Compares every loading mode with `cached`. Raises BackendFailed when the benchmark fails."""
    return measure(setup, setup.effort.modes)
