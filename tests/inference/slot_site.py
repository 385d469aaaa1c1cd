"""A small site for tests: a Redis, real slot processes on it, requests, and what an operator sees."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import redis

from inference.client import Client
from inference.protocol import Failure, GenerateRequest, Resident, Route, SamplingParams, TokenRow
from inference.queue import Lane, Queue
from inference.replicas import SlotStatus, list_slots
from tests.inference.instant_engine import golden_text
from tests.inference.slot_process import SlotProcess, wait_until
from tests.redis_server import RedisServer

LANE = Lane("chat", "small/1")
RESIDENT = Resident("chat", "small/1", "/artifact")
STEP_S = 0.02

_numbers = itertools.count()


class Site:
    """A Redis, the slots on it, and what an operator sees."""

    def __init__(self, server: RedisServer, directory: Path, stack: ExitStack) -> None:
        self.server = server
        self.queue = stack.enter_context(Queue(server.url))
        self._directory = directory
        self._stack = stack
        self.queue.apply_route(Route("chat", "a", 1, live="small/1"))

    def publish(self, *residents: Resident) -> None:
        self.queue.publish_desired(residents)

    def start_slot(self, name: str, **env: str) -> SlotProcess:
        log = self._directory / f"{name}.log"
        env = {"TATKAL_TEST_STEP_S": str(STEP_S)} | env
        return self._stack.enter_context(SlotProcess(self.server.url, name, log, **env))

    async def wait_for(self, is_true: Callable[[], bool], timeout_s: float = 15.0) -> None:
        await asyncio.to_thread(wait_until, is_true, timeout_s=timeout_s)

    async def wait_ready(self, *names: str, version: str = "small/1") -> None:
        def all_ready() -> bool:
            ready = {
                each.slot
                for each in self.slots()
                if (each.state, each.version) == ("ready", version)
            }
            return set(names) <= ready

        await self.wait_for(all_ready)

    def slots(self) -> list[SlotStatus]:
        return list_slots(self.queue)

    def flush(self) -> None:
        """Have Redis lose everything."""
        with redis.Redis.from_url(self.server.url) as client:
            client.flushall()

    def num_left(self) -> int:
        with redis.Redis.from_url(self.server.url) as client:
            return int(client.xlen(LANE.key("q")))

    def dead_letters(self) -> list[str]:
        with redis.Redis.from_url(self.server.url, decode_responses=True, protocol=2) as client:
            return [fields["id"] for _, fields in client.xrange("dead")]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = Client(self.server.url)
        await client.start()
        try:
            yield client
        finally:
            await client.close()


class Call:
    """One request and what came of it."""

    def __init__(
        self,
        client: Client,
        prompt: str = "Hello",
        *,
        max_tokens: int = 50,
        deadline_s: float = 30.0,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        request_id = f"r{next(_numbers)}"
        self.request = GenerateRequest(request_id, "chat", sampling, deadline_s, prompt=prompt)
        self.rows: list[TokenRow] = []
        self._client = client
        self.task = asyncio.create_task(self._read())

    @property
    def text(self) -> str:
        return "".join(row.text for row in self.rows)

    @property
    def failure(self) -> Failure | None:
        return self.rows[-1].failure

    @property
    def is_golden(self) -> bool:
        """Whether it is the whole answer, each token once and in order."""
        is_finished = self.rows[-1].finish is not None
        return is_finished and self.text == golden_text(self.request.sampling.max_tokens or 0)

    async def _read(self) -> None:
        async with self._client.stream(self.request, "user") as stream:
            async for rows in stream:
                self.rows += rows

    async def wait_for_rows(self, number: int) -> None:
        async with asyncio.timeout(15):
            while len(self.rows) < number and not self.task.done():
                await asyncio.sleep(0.01)
