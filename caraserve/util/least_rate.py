"""The rate below which a transfer from another machine counts as stuck."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeastRate:
    """At least `bytes_per_s`; a transfer may be behind by `grace_s`, at its beginning as at any later time."""

    grace_s: float
    bytes_per_s: float

    def deadline_s(self, now_s: float, num_bytes: int = 0, deadline_s: float = float("inf")) -> float:
        """Returns until when more must come, after `num_bytes` have come at `now_s`. `deadline_s`: until when those had
        to come; without it, the transfer begins now."""
        return min(deadline_s + num_bytes / self.bytes_per_s, now_s + self.grace_s)
