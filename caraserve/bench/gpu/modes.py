"""Stage `modes`: the load of stage `server` in every loading mode."""

from caraserve.bench.gpu.results import StageResult
from caraserve.bench.gpu.server import ServerFigures, measure
from caraserve.bench.gpu.setup import CheckSetup


def modes(setup: CheckSetup) -> StageResult[ServerFigures]:
    """Compares every loading mode with `cached`. Raises BackendFailed when the benchmark fails."""
    return measure(setup, setup.effort.modes)
