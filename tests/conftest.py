"""What tests of every part share: a real Redis, and the home of a whole instance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.instance import prepare_home
from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests of the run; use ``redis_url`` unless you mean to hurt it."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The address of a server that holds nothing yet."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture(scope="session")
def prepared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make run` prepares, for instances to start from; never started itself."""
    home = tmp_path_factory.mktemp("prepared") / "home"
    prepare_home(home)
    return home
