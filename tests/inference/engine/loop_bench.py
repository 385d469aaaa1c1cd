"""One engine loop with its intake in threads of the test's process, and the hands of a gateway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis

from inference.engine.intake import Intake
from inference.engine.loop import EngineLoop
from inference.protocol import GenerateRequest, Resident, Route, SamplingParams, StepFrame, TokenRow
from inference.queue import AsyncQueue, Lane, Lease, Placement, Queue
from inference.replicas import Member
from tests.inference.instant_engine import InstantEngine
from tests.inference.slot_process import wait_until

T = TypeVar("T")

LANE = Lane("chat", "small/1")
RESIDENT = Resident("chat", "small/1", "/artifact")


def run_body(body: Callable[[], None]) -> None:
    body()


class Bench:
    """One loop in threads of this process, and the hands of a gateway."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis: Any = redis.Redis.from_url(url, decode_responses=True, protocol=2)
        self.queue = Queue(url)
        self.queue.apply_route(Route("chat", "a", 1, live="small/1"))
        self.queue.publish_desired([RESIDENT])
        self.member = Member(self.queue, "slot-1", lease_ms=60_000)
        self.member.renew()
        self.member.adopt()
        self.queue.renew(Lease("probe", "probe.a", 60_000), "{}", LANE, is_ready=True)
        self.engine = InstantEngine()
        self.loop: EngineLoop | None = None
        self.thread: threading.Thread | None = None

    def start(self, *, step_s: float = 0.0) -> EngineLoop:
        self.engine = InstantEngine(step_s=step_s)
        self.loop = EngineLoop(self.engine, self.queue, LANE, self.member)
        self.intake = Intake(self.loop, self.engine, self.queue, LANE, self.member)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        self.intake.start(run_body)
        return self.loop

    def stop(self, drain_s: float = 0.0) -> None:
        if self.loop is not None and self.thread is not None:
            self.loop.drain(drain_s)
            self.thread.join(5)
            self.intake.stop(5)
            self.loop = None

    def send(
        self,
        request_id: str,
        prompt: str = "Hello",
        *,
        max_tokens: int = 4,
        deadline_s: float = 30.0,
        gateway: str = "gw",
        logprobs: int | None = None,
        **options: Any,
    ) -> Placement:
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        request = GenerateRequest(
            request_id, "chat", sampling, deadline_s, prompt=prompt, **options
        )
        return self.send_request(request, gateway)

    def send_request(self, request: GenerateRequest, gateway: str = "gw") -> Placement:
        return self._call(lambda link: link.enqueue(request, gateway, "user"))

    def cancel(self, request_id: str) -> None:
        self._call(lambda link: link.cancel(request_id))

    def frames(self, gateway: str = "gw") -> list[tuple[TokenRow, ...]]:
        entries = self.redis.xrange(f"out:{gateway}")
        return [StepFrame.from_json(fields["frame"]).rows for _, fields in entries]

    def rows(self, request_id: str) -> list[TokenRow]:
        return [row for rows in self.frames() for row in rows if row.request_id == request_id]

    def wait_for_last(self, request_id: str) -> list[TokenRow]:
        wait_until(lambda: any(row.is_last for row in self.rows(request_id)))
        return self.rows(request_id)

    def num_left(self) -> int:
        """Entries in the queue, delivered or not."""
        return int(self.redis.xlen(LANE.key("q")))

    def roll_back(self, *, in_flight: str) -> None:
        """Send the endpoint's requests to another version, which no slot of this test holds."""
        self.queue.apply_route(Route("chat", "a", 2, live="small/0"), in_flight=in_flight)

    def waiting(self, version: str) -> list[tuple[str, int]]:
        """Requests and earlier attempts in a lane."""
        entries = self.redis.xrange(Lane("chat", version).key("q"))
        return [(fields["id"], int(fields.get("attempt", 0))) for _, fields in entries]

    def dead_letters(self) -> list[str]:
        return [fields["id"] for _, fields in self.redis.xrange("dead")]

    def deliver_in_vain(self, times: int) -> None:
        """Let all queued entries be delivered to slots that die."""
        for number in range(times):
            consumer = f"dead-{number}.a"
            self.queue.pull(LANE, consumer, 100, 10)
            self.redis.set(f"slot:{consumer}", "1")
            self.queue.claim(LANE, consumer, 100, 99)
            self.redis.delete(f"slot:{consumer}")

    def _call(self, use: Callable[[AsyncQueue], Awaitable[T]]) -> T:
        async def call() -> T:
            link = AsyncQueue(self.url)
            try:
                return await use(link)
            finally:
                await link.close()

        return asyncio.run(call())
