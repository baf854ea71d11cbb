"""The Triton kernels with the release that the extra cuda12 brings, which is older than the one that tests install.

A process has one release of Triton, so scripts/test puts this one into a folder of its own, and the tests that depend
on the release run in a process that finds it first.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PINNED = re.search(r"^triton==(\S+)$", (ROOT / "scripts" / "constraints-cuda12.txt").read_text(), re.MULTILINE)
assert PINNED is not None
RELEASE = PINNED[1]
FOLDER = Path(sys.prefix) / f"triton-{RELEASE}"
RUN = "import sys, pytest, triton; assert triton.__version__ == sys.argv[1]; sys.exit(pytest.main(sys.argv[2:]))"


@pytest.mark.parametrize(
    "tests",
    [
        ("tests/gpu/kernels/test_triton_compile.py",),
        ("tests/gpu/forward/test_warm_up.py", "tests/gpu/test_triton_builds.py"),
    ],
    ids=["machine code", "warm-up"],
)
def test_all_holds_with_the_triton_of_cuda_12(tests: tuple[str, ...]) -> None:
    if not (FOLDER / "triton").is_dir():
        command = f"pip install --no-deps --target {FOLDER} triton=={RELEASE}"
        pytest.fail(f"Triton {RELEASE} is not in {FOLDER}; scripts/test installs it there, and so does: {command}")
    settings = {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    arguments = [sys.executable, "-c", RUN, RELEASE, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    done = subprocess.run(arguments, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
