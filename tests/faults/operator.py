"""What an operator does and sees during a fault: flips with their replies, queues, and how things come to rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from inference.queue import Lane
from tests.faults.history import Timeline, find_leftovers
from tests.faults.instance import Instance
from tests.inference.slot_process import wait_until


class Flips:
    """Promotes and rollbacks, with what they answered and when each version was live."""

    def __init__(self, instance: Instance) -> None:
        state = instance.endpoint()
        self.timeline = Timeline(state["generation"], state["live"])
        self.replies: list[dict[str, Any]] = []
        self.answered_at = 0.0

    async def flip(self, act: Callable[[], dict[str, Any]]) -> float:
        """Change the live version; how many seconds the answer took."""
        asked_at = time.monotonic()
        reply = await asyncio.to_thread(act)
        self.answered_at = time.monotonic()
        self.replies.append(reply)
        self.timeline.note(
            reply["generation"], reply["live"], asked_at=asked_at, answered_at=self.answered_at
        )
        return self.answered_at - asked_at


def count_delivered(instance: Instance, version: str) -> int:
    """How many requests of ``version`` are in the hands of slots."""
    queue = Lane(instance.endpoint_name, version).key("q")
    with instance.redis() as connection:
        if not connection.exists(queue):
            return 0
        groups = cast("list[Mapping[str, int]]", connection.xinfo_groups(queue))
        return sum(group["pending"] for group in groups)


def count_queued(instance: Instance, version: str) -> int:
    """How many requests wait for ``version`` and were not delivered to anybody."""
    queue = Lane(instance.endpoint_name, version).key("q")
    with instance.redis() as connection:
        return int(cast("int", connection.xlen(queue))) - count_delivered(instance, version)


async def wait_until_drained(instance: Instance, timeout_s: float = 10.0) -> None:
    """Return when Redis holds no request any more.

    Raises:
        AssertionError: something is left.
    """
    left: list[str] = []

    def is_drained() -> bool:
        with instance.redis() as connection:
            left[:] = find_leftovers(connection)
        return not left

    try:
        await asyncio.to_thread(wait_until, is_drained, timeout_s=timeout_s)
    except TimeoutError as error:
        raise AssertionError(f"Left behind: {left}") from error
