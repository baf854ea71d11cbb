"""Groups of instances that a test starts; all are stopped at its end."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.cluster.nodes import Instances, instances
from tests.cluster.pools import Pools, pools


@pytest.fixture
def running(tmp_path: Path) -> AbstractAsyncContextManager[Instances]:
    """Members with real sockets; none at first."""
    return instances(tmp_path)


@pytest.fixture
def fleet(tmp_path: Path) -> AbstractAsyncContextManager[Pools]:
    """Instances that share adapters; none at first."""
    return pools(tmp_path)
