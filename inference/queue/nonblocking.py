"""The gateway's connections: a bounded pool for calls, and one that waits for frames."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from inference.protocol import COPY_RUN_S, COPY_WAIT_S, GenerateRequest, StepFrame
from inference.queue.copies import ANSWERS_KEPT, ANSWERS_TTL_S
from inference.queue.lanes import Lane, Placement
from inference.queue.link import CONNECTION, QueueUnavailable, read_lua, translated

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
GATEWAY_LEASE_MS = 5_000
BODY_MARGIN_MS = (
    60_000  # a body outlives its deadline by this, so that a slot still finds whom to tell
)
FRAMES_TTL_S = 120
LOG_KEPT = 100_000
COPY_LIMITS_MS = (int(COPY_WAIT_S * 1000), int(COPY_RUN_S * 1000))


class UnknownEndpoint(Exception):
    """No route was ever published for the endpoint."""


class NoReadySlot(Exception):
    """No slot holds the version that the route names; ``retry_after_s`` says when to ask again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(NoReadySlot):
    """As many requests wait as the route allows; ``retry_after_s`` follows from the recent pace."""


class AsyncQueue:
    """The gateway's connections: a bounded pool for calls, one more that waits for frames."""

    def __init__(self, url: str, max_connections: int = 32) -> None:
        """Connects on first use, in the running loop."""
        self._redis: Any = _connect(url, max_connections)
        self._reader: Any = _connect(url, 1)
        self._enqueue = self._redis.register_script(read_lua("enqueue"))
        self._cancel = self._redis.register_script(read_lua("cancel"))

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()
        await self._reader.aclose()

    async def enqueue(self, request: GenerateRequest, gateway: str, sticky_key: str) -> Placement:
        """Queue a request on the version its endpoint's route chooses; equal sticky keys meet the same version.

        Raises:
            UnknownEndpoint: no such endpoint.
            NoReadySlot: nothing serves it at the moment.
            QueueFull: too many wait already.
            QueueUnavailable: Redis did not answer, and the request may or may not be queued; or Redis was emptied, and
                will be filled again in seconds.
        """
        endpoint = request.endpoint
        digest = hashlib.sha256(sticky_key.encode("utf-8", "surrogatepass")).hexdigest()
        limits = (int(request.deadline_s * 1000), BODY_MARGIN_MS, GATEWAY_LEASE_MS, *COPY_LIMITS_MS)
        keys = [f"route:{endpoint}", f"req:{request.id}", f"gateway:{gateway}", f"lanes:{endpoint}"]
        async with _answered():
            reply = await self._enqueue(
                keys,
                [endpoint, request.id, gateway, request.to_json(), digest, *limits, request.n],
            )
        match reply:
            case ["ok", version, generation, arm, entry_id, deadline_ms, store_texts, *pairing]:
                deadline_s = int(deadline_ms) / 1000
                store = store_texts == "1"
                rollout, kept_for = pairing
                placed = (version, int(generation), arm, entry_id, deadline_s, store)
                return Placement(*placed, rollout, tuple(kept_for.split()))
            case ["empty"]:
                raise QueueUnavailable("No routes are published.")
            case ["no_slot", wait_s]:
                raise NoReadySlot(f"No engine slot is ready to serve {endpoint!r}.", wait_s)
            case ["full", wait_s]:
                raise QueueFull(f"The queue of {endpoint!r} is full.", wait_s)
        raise UnknownEndpoint(f"There is no endpoint {endpoint!r}.")

    async def cancel(self, request_id: str) -> bool:
        """Nobody waits for the request any more, wherever it is now. True: it had not started and never will."""
        async with _answered():
            return bool(await self._cancel([f"req:{request_id}"], [request_id]))

    async def find_bodiless(self, request_ids: Sequence[str]) -> set[str]:
        """Those requests that are neither queued nor running: ended, cancelled, or lost with Redis' data."""
        if not request_ids:
            return set()
        pipe = self._redis.pipeline(transaction=False)
        for request_id in request_ids:
            pipe.exists(f"req:{request_id}")
        async with _answered():
            found = await pipe.execute()
        return {each for each, exists in zip(request_ids, found, strict=True) if not exists}

    async def read_frames(
        self, gateway: str, last_id: str, block_ms: int
    ) -> tuple[str, list[StepFrame]]:
        """Frames after ``last_id``, and the id to read on from; one that cannot be read is left out."""
        async with _answered():
            reply = await self._reader.xread({f"out:{gateway}": last_id}, 100, block_ms)
        rows = reply[0][1] if reply else []
        frames = [_parse_frame(gateway, *row) for row in rows]
        return (rows[-1][0] if rows else last_id), [frame for frame in frames if frame is not None]

    async def renew_gateway(self, gateway: str) -> None:
        """Tell slots that somebody still reads the rows."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(f"gateway:{gateway}", "1", px=GATEWAY_LEASE_MS)
        pipe.expire(f"out:{gateway}", FRAMES_TTL_S)
        async with _answered():
            await pipe.execute()

    async def release_gateway(self, gateway: str) -> None:
        """Nobody reads the rows any more."""
        async with _answered():
            await self._redis.unlink(f"gateway:{gateway}", f"out:{gateway}")

    async def endpoints(self) -> list[str]:
        """Names of all routed endpoints, sorted."""
        async with _answered():
            return sorted(await self._redis.smembers("endpoints"))

    async def ready_endpoints(self) -> list[str]:
        """Names of the endpoints whose live version has a ready slot, sorted."""
        names = await self.endpoints()
        async with _answered():
            pipe = self._redis.pipeline(transaction=False).time()
            for name in names:
                pipe.hget(f"route:{name}", "live")
            (seconds, micros), *versions = await pipe.execute()
            pipe = self._redis.pipeline(transaction=False)
            for name, version in zip(names, versions, strict=True):
                now_ms = seconds * 1000 + micros // 1000
                pipe.zcount(Lane(name, version or "").key("ready"), f"({now_ms}", "+inf")
            counts = await pipe.execute()
        return [name for name, count in zip(names, counts, strict=True) if count]

    async def read_key(self, key_id: str) -> str | None:
        """What was published for the key, or None.

        Raises:
            QueueUnavailable: no keys are published: Redis was emptied, and will be filled again in seconds.
        """
        async with _answered():
            text: str | None
            text, is_filled = await self._redis.mget(f"key:{key_id}", "keys")
        if text is None and is_filled is None:
            raise QueueUnavailable("No keys are published.")
        return text

    async def append_answers(self, answers: Sequence[bytes]) -> None:
        """Add incumbents' halves of pairs (JSON) to the answers that are to be compared."""
        pipe = self._redis.pipeline(transaction=False)
        for answer in answers:
            pipe.xadd("answers", {"answer": answer}, maxlen=ANSWERS_KEPT)
        pipe.expire("answers", ANSWERS_TTL_S)
        async with _answered():
            await pipe.execute()

    async def append_log(self, records: Sequence[bytes]) -> None:
        """Add records (JSON) to the request log."""
        pipe = self._redis.pipeline(transaction=False)
        for record in records:
            pipe.xadd("log", {"record": record}, maxlen=LOG_KEPT)
        async with _answered():
            await pipe.execute()


def _parse_frame(gateway: str, entry_id: str, fields: Mapping[str, str]) -> StepFrame | None:
    try:
        return StepFrame.from_json(fields["frame"])
    except (ValueError, TypeError, KeyError):  # its streams end by their gap; all others go on
        logger.exception("frame cannot be read gateway=%s entry=%s", gateway, entry_id)
        return None


def _connect(url: str, max_connections: int) -> Any:
    """A client whose callers wait for one of its connections, and not for ever."""
    pool: Any = redis.asyncio.BlockingConnectionPool
    client: Any = redis.asyncio.Redis
    # With a socket_timeout redis-py sends through asyncio.wait_for, which on Python 3.11 swallows a cancellation that
    # comes in the same tick: a caller who went away would be served on. _answered() is the timeout instead.
    settings = CONNECTION | {"socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
    return client.from_pool(
        pool.from_url(url, max_connections=max_connections, timeout=CALL_TIMEOUT_S, **settings)
    )


@asynccontextmanager
async def _answered() -> AsyncIterator[None]:
    """A call to Redis that ends in time, one way or the other."""
    with translated():
        async with asyncio.timeout(CALL_TIMEOUT_S):
            yield
