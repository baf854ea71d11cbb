"""The program of the single executable that scripts/build_binary makes: the `caraserve` command without a Python.

The server starts helpers of its own as `sys.executable -m caraserve.…`. The executable is no interpreter that could
take that, so it runs such modules itself.
"""

import runpy
import sys

from caraserve.__main__ import run

_PACKAGE = "caraserve"


def main() -> int:
    """Runs the command, or one module of the package."""
    words = sys.argv[1:]
    if words[:1] != ["-m"]:
        return run()
    if len(words) < 2 or words[1].partition(".")[0] != _PACKAGE:
        sys.exit(f"caraserve: -m takes modules of {_PACKAGE} only")
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
