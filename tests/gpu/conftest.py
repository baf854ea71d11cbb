"""Gives every test that requests one its own stub of the driver library, and all that request it the same model with
adapters of all kinds."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.stub_driver import DriverCase, Stub, build

if TYPE_CHECKING:
    from tests.oracle.subject import Subject


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> "Subject":
    from tests.oracle.subject import make_subject  # imports transformers, which most tests here do without

    return make_subject(tmp_path_factory.mktemp("subject"))


@pytest.fixture(scope="module")
def torch_for_triton() -> Iterator[None]:
    """Replaces the Triton kernels by those of torch_kernels.py."""
    from tests.gpu.torch_kernels import torch_kernels  # imports torch, as above

    with torch_kernels():
        yield


@pytest.fixture(scope="session")
def library() -> Path:
    return build()


@pytest.fixture
def stub(library: Path) -> Stub:
    return Stub(library)


@pytest.fixture
def case(stub: Stub) -> DriverCase:
    return DriverCase(stub)
