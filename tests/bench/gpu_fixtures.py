"""A pytest plugin for a machine that has torch, and neither Redis nor Django: the fixtures of the device's tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from tests.inference.tiny_artifact import write_tiny


class WriteTinyArtifact(Protocol):
    """As in ``tests/inference/conftest.py``."""

    def __call__(self, **shape: object) -> Path: ...


@pytest.fixture(scope="session")
def write_tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> WriteTinyArtifact:
    """As in ``tests/inference/conftest.py``."""
    return partial(write_tiny, tmp_path_factory.mktemp("tiny"))


def pytest_configure(config: pytest.Config) -> None:
    """The markers, since this run does not read ``pyproject.toml``."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
