"""Where files that can be made again are kept."""

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Returns `$XDG_CACHE_HOME/caraserve/kind`, by default under ~/.cache. The folder may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caraserve" / kind
