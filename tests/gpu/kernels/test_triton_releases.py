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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PINNED = re.search(r"^triton==(\S+)$", (ROOT / "scripts" / "constraints-cuda12.txt").read_text(), re.MULTILINE)
assert PINNED is not None
RELEASE = PINNED[1]
FOLDER = Path(sys.prefix) / f"triton-{RELEASE}"
RUN = "import sys, pytest, triton; assert triton.__version__ == sys.argv[1]; sys.exit(pytest.main(sys.argv[2:]))"


COMPILED = "tests/gpu/kernels/test_triton_compile.py"


@pytest.mark.parametrize(
    "tests",
    [
        # Every kernel for both kinds of matrix instructions, and the attention that takes the most shared memory or
        # registers. Other sizes and GPUs are compiled by the newer release alone: each kernel takes a second.
        (
            f"{COMPILED}::test_a_decoders_own_launches_fit_the_smallest_shared_memory",
            f"{COMPILED}::test_bf16_kernels_fit_and_do_not_spill[90]",
            f"{COMPILED}::test_attention_of_other_groups_and_head_sizes_does_not_spill_on_large_gpus[100-64-8]",
            f"{COMPILED}::test_capped_scores_fit_and_do_not_spill[90-256]",  # on 86 this release spills 8 bytes
            f"{COMPILED}::test_fp32_and_high_ranks_fit_the_smallest_shared_memory",
            f"{COMPILED}::test_products_with_quantised_weights_fit_and_do_not_spill[89-Code.F8_E4M3-True]",
            f"{COMPILED}::test_products_with_grouped_codes_fit_and_do_not_spill[86-Q6_K-16]",
            f"{COMPILED}::test_kernels_that_add_lora_to_what_they_read_fit_and_do_not_spill[90]",
            f"{COMPILED}::test_rounding_scaling_and_dequantising_fit_and_do_not_spill",
            f"{COMPILED}::test_experts_fit_and_do_not_spill[90-4096]",
            f"{COMPILED}::test_delta_nets_fit_and_do_not_spill[90]",
        ),
        ("tests/gpu/forward/test_warm_up.py", "tests/laboratory/gpu/test_triton_builds.py"),
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
