"""Gives every test that requests one its own stub of the driver library, and all that request it the same model with
adapters of all kinds."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.stub_driver import Stub, World, build

if TYPE_CHECKING:
    from tests.oracle.subject import Subject


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> "Subject":
    from tests.oracle.subject import make_subject  # imports transformers, which most tests here do without

    return make_subject(tmp_path_factory.mktemp("subject"))


@pytest.fixture(scope="session")
def library() -> Path:
    return build()


@pytest.fixture
def stub(library: Path) -> Stub:
    return Stub(library)


@pytest.fixture
def world(stub: Stub) -> World:
    return World(stub)
