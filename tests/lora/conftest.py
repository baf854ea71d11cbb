"""What the tests of several files about adapters use."""

from pathlib import Path

import pytest

from tests.lora.folders import write_adapter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an adapter outside of the root."""
    return write_adapter(tmp_path / "made")
