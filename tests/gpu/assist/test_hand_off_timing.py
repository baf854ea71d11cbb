"""Hand-offs timed for a machine profile, over an emulated device and with a real worker."""

import os
from pathlib import Path
from queue import SimpleQueue

from tests.gpu.host_backend import PATIENCE_S, alone, host_tier
from tests.gpu.torch_kernels import torch_kernels
from tests.oracle.subject import KINDS, make_subject


def test_hand_offs_are_timed_with_the_kernels_and_words_of_serving(tmp_path: Path) -> None:
    """Of all layers, though their weights are on the device; nothing is held afterwards."""
    subject, loaded = make_subject(tmp_path, {"r8": KINDS["r8"]}), SimpleQueue[Exception | None]()
    with torch_kernels(), alone(subject.model, lora_cpus=(min(os.sched_getaffinity(0)),)) as host:
        adapter = host_tier(host, subject.adapters, subject.model)["r8"]
        host.backend.load_adapter(adapter, 1, loaded.put)
        assert loaded.get(timeout=PATIENCE_S) is None
        assert host.backend.time_hand_off(1, 1) is None, "there is no worker yet"
        host.backend.start_workers(lambda rank: 64)
        assert host.backend.workers.await_all(PATIENCE_S)
        for tokens in (1, 16):
            timed = host.backend.time_hand_off(1, tokens)
            assert timed is not None
            assert timed.total_s > timed.compute_s > 0
        (worker,) = host.backend.workers.states()
        assert worker.hand_offs == 2 * host.parts.spec.layers
        host.check_at_rest()
