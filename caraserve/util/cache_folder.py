"""Where files are kept that no option names: a cache of what can be made again, and data."""

import os
import tempfile
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Returns `$XDG_CACHE_HOME/caraserve/kind`, by default under ~/.cache. The folder may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caraserve" / kind


def data_folder(kind: str) -> Path:
    """Returns `$XDG_DATA_HOME/caraserve/kind`, by default under ~/.local/share. The folder may not exist yet. Raises
    RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "caraserve" / kind


def why_unwritable(folder: Path) -> str:
    """Returns why no file can be written to a folder, which is made if it does not exist; "" if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
