"""The `caraserve` command, also as `python -m caraserve`. Ctrl-C leaves no traceback, from the first import on."""

import signal
import sys


def run() -> int:
    """Runs the command; returns the exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where the signal is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from caraserve.cli.main import main  # imports for 0.1 s or more

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
