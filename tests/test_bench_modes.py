"""`scripts/bench/modes.py` runs to its end with a tiny model, and its document holds numbers for every mode."""

import json
import math
import subprocess
import sys
from pathlib import Path

from caraserve.config import LOADING_MODES, PRELOADED_MODES

ROOT = Path(__file__).parent.parent
SIZES = {
    "--model": "10M",
    "--adapters": "4",
    "--resident": "2",
    "--rank": "8",
    "--prompt-tokens": "16",
    "--output-tokens": "4",
    "--requests": "6",
    "--repeats": "1",
    "--rps": "50",
    "--calm-cores": "1000",  # other tests run beside it
    "--threads": "1",
}
TIMES = ("ttft_ms", "ttft_p50_ms", "ttft_p99_ms", "tpt_ms", "e2e_ms", "gap_p99_ms", "prefill_ms", "decode_ms")


def test_every_mode_is_measured(tmp_path: Path) -> None:
    script, profile, file = ROOT / "scripts/bench/modes.py", Path(__file__).with_name("profile.json"), tmp_path / "out"
    sizes = [word for option in SIZES.items() for word in option]
    command = [sys.executable, str(script), *sizes, "--profile", str(profile), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "link emulated at 1000 MB/s" in done.stdout
    result = json.loads(file.read_text(encoding="utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert result["setting"]["link_mb_per_s"] == 1000
    assert tuple(result["modes"]) == LOADING_MODES
    for mode, measured in result["modes"].items():
        values = [measured["metrics"][name]["median"] for name in TIMES]
        values += [measured["over_cached"][name]["median"] for name in ("ttft_ms", "tpt_ms", "e2e_ms", "gap_p99_ms")]
        assert all(math.isfinite(value) and value > 0 for value in values), mode
        assert [len(requests) for requests in measured["requests"]] == [6]
        assert (measured["metrics"]["cold_share"]["median"] > 0) == (mode not in PRELOADED_MODES)
