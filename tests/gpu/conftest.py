"""Gives every test that requests one its own stub of the driver library."""

from pathlib import Path

import pytest

from tests.gpu.stub_driver import Stub, World, build


@pytest.fixture(scope="session")
def library() -> Path:
    return build()


@pytest.fixture
def stub(library: Path) -> Stub:
    return Stub(library)


@pytest.fixture
def world(stub: Stub) -> World:
    return World(stub)
