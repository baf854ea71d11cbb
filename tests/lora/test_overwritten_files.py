"""Adapters whose files are overwritten and cut short while they load: each load returns the file's contents or refuses
it."""

import os
import subprocess
import sys
from pathlib import Path

from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft import inspect_adapter
from tests.lora.folders import SPEC, write_adapter

_ROUNDS = 2_000  # each cuts the file short, then writes it again in place, as `cp` does
_HEADER_BYTES = 512 << 10  # the maximum, so that reading it takes a while
_LOADS = """
import sys, threading
from pathlib import Path

from caraserve.lora.peft import inspect_adapter
from caraserve.errors import AdapterRejected
from tests.lora.folders import SPEC

stopped = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stopped.set())).start()
print("loading", flush=True)
loaded, refused = set(), 0
while not stopped.is_set():
    try:
        loaded.add(inspect_adapter(Path(sys.argv[1]), SPEC).digest)
    except AdapterRejected:
        refused += 1
print(*loaded, refused)
"""


def test_files_overwritten_and_cut_short_thousands_of_times_while_they_load(tmp_path: Path) -> None:
    """They are loaded in a process of their own, because a mapping of such a file would end it by SIGBUS."""
    path = write_adapter(tmp_path) / TENSORS_NAME
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:header_end].ljust(_HEADER_BYTES)
    content = _HEADER_BYTES.to_bytes(8, "little") + header + content[header_end:]
    path.write_bytes(content)
    digest = inspect_adapter(tmp_path, SPEC).digest
    command = [sys.executable, "-c", _LOADS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as loads:
        assert loads.stdout is not None
        assert loads.stdout.readline() == "loading\n"
        with path.open("r+b", buffering=0) as file:
            for _ in range(_ROUNDS):
                file.truncate(4096)
                os.pwrite(file.fileno(), content, 0)
        printed, _ = loads.communicate(timeout=30)
    assert loads.returncode == 0, f"exit code {loads.returncode}"
    *loaded, refused = printed.split()
    assert set(loaded) <= {digest}
    assert int(refused) > 0
