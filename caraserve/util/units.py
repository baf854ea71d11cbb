"""Integer arithmetic, and sizes in bytes as people write them."""


def ceil_div(value: int, divisor: int) -> int:
    """Returns `value / divisor`, rounded up."""
    return -(-value // divisor)


def align_up(value: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def human_bytes(num_bytes: float) -> str:
    """Formats bytes: 1536 → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def parse_bytes(text: str) -> int:
    """Parses `2GiB`, `500MB`, `64m` or `1024`; returns bytes. Raises ValueError with valid examples."""
    units = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "kb": 10**3, "m": 2**20, "mib": 2**20, "mb": 10**6}
    units |= {"g": 2**30, "gib": 2**30, "gb": 10**9}
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(digits) :].lower()
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 2GB or 1048576") from None
    if not 0 <= value < 2**62:
        raise ValueError(f"{text!r} is out of range for a size in bytes")
    return int(value)
