"""Matches regular expressions of an adapter's configuration with names of modules, as PEFT does.

An expression from an untrusted file can take years, and nothing in Python stops it. So it is matched by a process of
its own, `python -m caraserve.lora.target_patterns`, which ends when it has used its time.
"""

import json
import re
import resource
import signal
import subprocess
import sys
from functools import lru_cache

from caraserve.errors import ServerBusy

_CPU_S = 0.5
_DATA_BYTES = 256 << 20
_LONGEST_S = 60.0  # on a busy machine
_MOST_CHARACTERS = 16 << 10
_RETRY_S = 1.0


@lru_cache(maxsize=256)
def matched(pattern: str, modules: tuple[str, ...]) -> frozenset[str]:
    """Returns the modules that a pattern matches. Raises ValueError with what is wrong with it, or ServerBusy if it
    cannot be matched now."""
    if len(pattern) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(pattern)} characters; {_MOST_CHARACTERS} at most are matched")
    command = [sys.executable, "-m", "caraserve.lora.target_patterns"]
    text = json.dumps([pattern, modules, _CPU_S])
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        raise _busy(f"it has not ended within {_LONGEST_S:g} s") from None
    except OSError as failure:
        raise _busy(f"it cannot be started: {failure.strerror}") from None
    if done.returncode != 0:
        raise ValueError(f"matching it takes more than {_CPU_S:g} s of CPU or {_DATA_BYTES >> 20} MiB of memory")
    found, error = json.loads(done.stdout)
    if error is not None:
        raise ValueError(f"it is not a valid regular expression: {error}")
    return frozenset(found)


def _busy(why: str) -> ServerBusy:
    process = "The process that matches regular expressions of adapters' configurations"
    return ServerBusy(f"{process} cannot be used now: {why}; try again.", retry_after_s=_RETRY_S)


def main() -> None:
    """Answers one pattern."""
    pattern, modules, cpu_s = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends this process
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))
    found, error = [], None
    try:
        compiled = re.compile(pattern)
        found = [module for module in modules if compiled.fullmatch(module)]
    except (re.error, RecursionError, OverflowError) as failure:
        error = str(failure)[:200]
    json.dump([found, error], sys.stdout)


if __name__ == "__main__":
    main()
