"""What the tests of several files about adapters use."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver, receiving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an adapter outside of the root."""
    return write_adapter(tmp_path / "made")


@pytest.fixture
def receiver(tmp_path: Path) -> AbstractAsyncContextManager[Receiver]:
    """A catalog with uploads below the empty folder `root`."""
    return receiving(tmp_path / "root")
