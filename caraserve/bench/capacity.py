"""How much load a machine bears, and at which share of that the papers' machines ran. Level 5.

A rate means nothing without the machine it is for. Toppings' A100 was busy for 46 to 81 % of the time at the highest
rate of its settings (9 requests a second, section 7.2), so a setting's highest rate is taken for 0.65 of its machine's
capacity, and lower ones in proportion. Here the capacity is measured: requests a second in a closed loop with every
adapter on the device.
"""

from caraserve.bench.records import Run
from caraserve.bench.workload.presets import Preset, load_presets

SHARE_OF_HIGHEST_RATE = 0.65
CONCURRENCY = 32
PROBE_REQUESTS = 96  # enough that the first and the last, when the loop is not full, do not count


def share_of_capacity(preset: Preset | None) -> float:
    """At which share of its machine's capacity the paper ran the setting, by the account above."""
    if preset is None or preset.rates is None:
        return SHARE_OF_HIGHEST_RATE
    kin = [
        other.rates.default
        for other in load_presets().values()
        if other.rates is not None
        and (other.source.split(",")[0], other.base_model.default, other.hardware, other.lengths.default)
        == (preset.source.split(",")[0], preset.base_model.default, preset.hardware, preset.lengths.default)
    ]
    return SHARE_OF_HIGHEST_RATE * preset.rates.default / max(kin)


def capacity_per_s(run: Run) -> float:
    """Requests a second while the loop was full: between the first end and the last sending. Raises ValueError when
    too few were answered to say."""
    done = sorted(record.done_s for record in run.records if record.error is None)
    if len(done) < 2:
        raise ValueError("too few requests were answered to measure the capacity")
    last_sent_s = max(record.sent_s for record in run.records)
    full = [at_s for at_s in done if at_s <= last_sent_s]
    if len(full) < 2:
        full = done  # fewer requests than places: the loop was never full for long
    return (len(full) - 1) / (full[-1] - full[0]) if full[-1] > full[0] else len(done) / run.wall_s
