"""What tests of the control plane share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference.queue import Queue


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    """A connection to an empty Redis of this test's own."""
    with Queue(redis_url) as queue:
        yield queue


@pytest.fixture
def absent_queue() -> Iterator[Queue]:
    """A queue whose server is not there."""
    with Queue("redis://127.0.0.1:1/0") as queue:
        yield queue
