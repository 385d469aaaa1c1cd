"""One blocking connection: its scripts, and reading as a member of a consumer group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference.queue.link import CONNECTION, create_group, read_lua, translated

_SCRIPTS = (
    *("adopt", "answer", "apply", "claim", "copy", "give_back", "give_up", "renew", "rescue"),
    "take_copies",
)
# Sent as text: inside a pipeline nobody could load them again.
_PIPED = ("requeue", "send", "settle")


class Connection:
    """The blocking connection; safe to share between threads."""

    def __init__(self, url: str) -> None:
        """Connects on first use. ``url`` is ``redis://[:password@]host:port/db`` (or ``rediss``, ``unix``)."""
        self._redis: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **CONNECTION)
        self._lua = {name: self._redis.register_script(read_lua(name)) for name in _SCRIPTS}
        self._piped = {name: read_lua(name) for name in _PIPED}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; the next call would open new ones."""
        self._redis.close()

    def ping(self) -> None:
        """Return if Redis answers."""
        with translated():
            self._redis.ping()

    def _pipe(self, pipe: Any, name: str, keys: Sequence[str], *args: Any) -> None:
        pipe.eval(self._piped[name], len(keys), *keys, *args)

    def _read_group(
        self, group: str, consumer: str, stream: str, start: str, count: int, block_ms: int | None
    ) -> list[tuple[str, dict[str, str]]]:
        # Redis may lose its memory while the second read waits, too: then the caller, who asks for ever, asks again.
        for _ in range(2):
            with translated():
                try:
                    reply = self._redis.xreadgroup(
                        group, consumer, {stream: start}, count, block_ms
                    )
                except redis.ResponseError as error:
                    create_group(self._redis, stream, group, error)
                else:
                    return reply[0][1] if reply else []
        return []
