"""How we are connected: timeouts, the one error for a Redis that is away, scripts, consumer groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

CONNECTION: dict[str, Any] = {
    "decode_responses": True,
    "protocol": 2,
    "socket_timeout": 5.0,  # above every blocking read, below every patience
    "socket_connect_timeout": 2.0,
}
# What the server says, though it answers, while it can serve nobody: its disk is full, a script hogs it, it has just
# started, or lost its primary or its replicas.
_UNABLE = ("MISCONF", "BUSY", "LOADING", "MASTERDOWN", "NOREPLICAS")
_OF_PIPELINE = "of pipeline caused error: "  # redis-py writes this before what the server said
_LUA = Path(__file__).parents[1] / "lua"
_OF_COPIES = ("answer", "apply", "copy", "enqueue", "give_up", "take_copies")


class QueueUnavailable(Exception):
    """Redis cannot be reached, does not answer in time, or takes no writes; trying again later can help."""


class OutageLog:
    """One line when an outage begins, then one in ``EVERY_S`` seconds, however often it is met.

    Whoever calls ``end`` has one more when it is over.
    """

    EVERY_S = 10.0

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._quiet_until = 0.0
        self._began_at: float | None = None

    def warn(self, what: str, who: str, error: Exception) -> None:
        """``what`` of ``who`` waits because of ``error``."""
        if self._began_at is None:
            self._began_at = time.monotonic()
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + self.EVERY_S
            self._logger.warning("%s waits for Redis name=%s error=%s", what, who, error)

    def end(self, what: str, who: str) -> None:
        """``what`` of ``who`` goes on; nothing happens where it did not wait."""
        if self._began_at is not None:
            waited_s = time.monotonic() - self._began_at
            self._began_at, self._quiet_until = None, 0.0
            self._logger.warning("%s goes on name=%s waited_s=%.1f", what, who, waited_s)


def read_lua(name: str) -> str:
    """The text of one script, behind what scripts share."""
    shared = ("lanes", "copies") if name in _OF_COPIES else ("lanes",)
    texts = [(_LUA / f"{each}.lua").read_text(encoding="utf-8") for each in (*shared, name)]
    return "\n".join(texts)


@contextmanager
def translated() -> Iterator[None]:
    """Turn every way in which Redis can be away into ``QueueUnavailable``."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise QueueUnavailable(f"Redis cannot be reached: {error}") from error
    except (redis.exceptions.OutOfMemoryError, redis.ReadOnlyError) as error:
        raise QueueUnavailable(f"Redis takes no writes: {error}") from error
    except redis.ResponseError as error:
        if not _is_unable(error):
            raise
        raise QueueUnavailable(f"Redis cannot serve: {error}") from error


def create_group(link: Any, stream: str, group: str, error: redis.ResponseError) -> None:
    """Create a group that is not there (yet, or since Redis lost it); any other error is ours to see."""
    if not any(sign in str(error) for sign in ("NOGROUP", "no such key")):
        raise error
    try:
        link.xgroup_create(stream, group, "0", mkstream=True)
    except redis.ResponseError as race:
        if "BUSYGROUP" not in str(race):
            raise


def _is_unable(error: redis.ResponseError) -> bool:
    """Whether the server's state is the reason, and not what it was asked."""
    if isinstance(error, redis.exceptions.MasterDownError):
        return True  # redis-py has cut the code off
    said = (
        str(error).rpartition(_OF_PIPELINE)[2].lstrip("('\"")
    )  # asyncio's pipeline quotes a tuple
    return said.split(" ")[0] in _UNABLE
