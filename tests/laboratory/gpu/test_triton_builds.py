"""What Triton compiles for a GPU, recorded, compiled ahead and counted, on a machine without one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from caraserve.gpu.forward.warm_up import LateKernels
from caraserve.gpu.kernels.elementwise import cap_logits
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.compile_ahead import compiled, warm_up_all
from scripts.laboratory.gpu.setup import TINY, CheckEffort
from scripts.laboratory.gpu.triton_builds import compile_only, recorded

CAPABILITY = 90


@pytest.fixture(autouse=True)
def for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Makes Triton compile for a GPU, to an empty folder; a launch ends where the device would begin."""
    run: Callable[..., Any] = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **named: run(self, *args, **named | {"warmup": True}))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = driver._active
    compile_only(CAPABILITY)
    yield
    driver._active = before


def launch(columns: int) -> None:
    """Launches a kernel that is compiled again if `columns` is no multiple of 16."""
    cap_logits(torch.empty(4, columns, dtype=torch.bfloat16, device="meta"), 1.0, None)


def test_what_is_compiled_ahead_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    builds = recorded(lambda: (launch(64), launch(64), launch(96), launch(33)))
    assert [build.kernel for build in builds] == ["cap_kernel"] * 2  # widths of 16s, and others
    assert not list(tmp_path.iterdir())
    assert compiled(builds[:1], [], CAPABILITY, processes=1) == {}
    ahead = set(tmp_path.rglob("*"))
    assert any(path.suffix == ".cubin" for path in ahead)
    late = LateKernels()
    late.watch()
    try:
        launch(64)
        launch(96)
        assert late.count == 1  # read from the folder
        assert set(tmp_path.rglob("*")) == ahead
        launch(33)
        assert late.count == 2
    finally:
        late.stop()
    assert set(tmp_path.rglob("*")) > ahead


def test_the_warm_up_of_a_backend_on_no_device_shows_every_kernel() -> None:
    setup: Any = SimpleNamespace(effort=CheckEffort(compiled=((TINY, Dtype.F32),)), cores=lambda most: (0,))
    builds = recorded(lambda: warm_up_all(setup))
    assert {build.kernel for build in builds} >= {
        *("embed_kernel", "norm_kernel", "rotate_kernel", "activate_kernel"),
        *("decode_kernel", "merge_kernel", "prefill_kernel", "shrink_kernel", "expand_kernel"),
    }
