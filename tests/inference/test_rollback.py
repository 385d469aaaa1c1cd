"""A bad version is taken back while real slots of it run, hang, sleep and die: whose request goes where, and when."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from inference.client import Client
from inference.protocol import Resident, Route, StepFrame
from inference.queue import Applied
from tests.inference.instant_engine import golden_text
from tests.inference.slot_process import LEASE_MS, SlotProcess
from tests.inference.slot_site import Call, Site
from tests.redis_server import RedisServer

NUM_SEQS = 10
BAD = Resident(
    "chat",
    "small/2",
    "/bad",
    {"max_num_seqs": NUM_SEQS, "max_num_batched_tokens": 64},
    role="live",
)
GOOD = Resident("chat", "small/1", "/good", role="previous")
SLOW_PROMPT = "slow"  # for a hundred steps it has no token

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


class BadRelease(Site):
    """The bad version is live and full, the good one is kept ready; each speaks with a voice of its own."""

    async def start(self) -> None:
        self.redis: Any = self._stack.enter_context(
            redis.Redis.from_url(self.server.url, decode_responses=True, protocol=2)
        )
        self.publish(BAD, GOOD)
        self.bad = self._start("slot-bad", step_s=0.05)
        await self.wait_ready("slot-bad", version="small/2")
        self.good = self._start("slot-good", step_s=0.001)
        await self.wait_ready("slot-good")
        self.apply("small/2", 2)

    def _start(self, name: str, *, step_s: float) -> SlotProcess:
        return self.start_slot(name, TATKAL_TEST_VOICES="1", TATKAL_TEST_STEP_S=str(step_s))

    async def fill(self, client: Client, *, num_queued: int) -> None:
        """Half of what runs has sent tokens; the other half and what waits have not."""
        half = NUM_SEQS // 2
        self.begun = [Call(client, f"begun {i}", max_tokens=60) for i in range(half)]
        await asyncio.gather(*(call.wait_for_rows(2) for call in self.begun))
        self.silent = [Call(client, f"{SLOW_PROMPT} {i}", max_tokens=16) for i in range(half)]
        await self.wait_for(lambda: self.count("small/2") == (0, NUM_SEQS))
        self.queued = [Call(client, f"queued {i}", max_tokens=16) for i in range(num_queued)]
        await self.wait_for(lambda: self.count("small/2") == (num_queued, NUM_SEQS))

    def roll_back(self, in_flight: str = "finish") -> Applied:
        """The good version is live again, the bad one kept to be looked at."""
        applied = self.apply(GOOD.version, 3, in_flight)
        self.publish(replace(GOOD, role="live"), replace(BAD, role="retired"))
        return applied

    def apply(self, live: str, generation: int, in_flight: str = "finish") -> Applied:
        return self.queue.apply_route(Route("chat", "a", generation, live), in_flight=in_flight)

    def count(self, version: str) -> tuple[int, int]:
        """What waits and what runs."""
        lanes = {each.version: each for each in self.queue.read_lanes("chat")}
        lane = lanes.get(version)
        return (lane.num_queued, lane.num_in_flight) if lane else (0, 0)

    def consumers(self, slot: str) -> list[str]:
        return sorted(self.redis.scan_iter(f"slot:{slot}.*"))

    def frames(self, client: Client) -> list[StepFrame]:
        rows = self.redis.xrange(f"out:{client.gateway_id}")
        return [StepFrame.from_json(fields["frame"]) for _, fields in rows]


@pytest.fixture
def site(redis_server: RedisServer, redis_url: str, tmp_path: Path) -> Iterator[BadRelease]:
    with ExitStack() as stack:
        yield BadRelease(redis_server, tmp_path, stack)


def answered_by(call: Call) -> str:
    """Whose whole answer it is: each token once, in order, to this very prompt."""
    if call.rows[-1].finish is None:
        return f"nobody: {call.failure}"
    num_tokens = call.request.sampling.max_tokens or 0
    for voice in ("good", "bad"):
        if call.text == golden_text(num_tokens, voice=voice, prompt=call.request.prompt or ""):
            return voice
    return f"a mixture: {call.text}"


def code(call: Call) -> str:
    return call.failure.code if call.failure else "none"


async def test_requests_of_a_version_whose_process_sleeps_are_served_by_the_previous_one(
    site: BadRelease,
) -> None:
    await site.start()
    async with site.client() as client:
        await site.fill(client, num_queued=30)
        (old_name,) = site.consumers("slot-bad")

        site.bad.send(signal.SIGSTOP)
        stopped_at = time.monotonic()
        applied = site.roll_back()
        assert time.monotonic() - stopped_at < 1.0
        assert applied == Applied(True, num_requeued=30, num_in_flight=NUM_SEQS)
        new = Call(client, "new", max_tokens=16)
        await asyncio.gather(*(call.wait_for_rows(1) for call in (new, *site.queued)))
        queued_s = time.monotonic() - stopped_at
        await asyncio.gather(*(call.wait_for_rows(1) for call in site.silent))
        silent_s = time.monotonic() - stopped_at
        await asyncio.gather(*(call.task for call in site.begun))
        num_frames = len(site.frames(client))

        site.bad.send(signal.SIGCONT)
        await site.wait_for(lambda: "lease lost" in site.bad.read_log())
        await site.wait_for(lambda: site.consumers("slot-bad") not in ([], [old_name]))
        await asyncio.gather(*(call.task for call in (new, *site.queued, *site.silent)))
        late = [frame.slot for frame in site.frames(client)[num_frames:]]

        site.apply("small/2", 4)
        again = Call(client, "again", max_tokens=8)
        await again.task

    served = (new, *site.queued, *site.silent)
    assert [answered_by(call) for call in served] == ["good"] * len(served)
    assert {row.attempt for call in site.silent for row in call.rows} == {2}
    assert {code(call) for call in site.begun} == {"slot_lost"}
    assert queued_s < 1.0
    assert silent_s < LEASE_MS / 1000 + 1.0
    assert "slot-bad" not in late
    assert answered_by(again) == "bad"
    await site.wait_for(lambda: site.count("small/1") == site.count("small/2") == (0, 0))


@pytest.mark.parametrize("policy", ["finish", "retry_if_no_token", "cut"])
async def test_what_runs_ends_by_the_policy(site: BadRelease, policy: str) -> None:
    await site.start()
    async with site.client() as client:
        await site.fill(client, num_queued=3)

        applied = site.roll_back(policy)
        applied_at = time.monotonic()
        assert (applied.num_requeued, applied.num_in_flight) == (3, NUM_SEQS)
        if policy != "finish":
            await asyncio.gather(*(call.wait_for_rows(1) for call in site.silent))
            assert time.monotonic() - applied_at < 2.0  # alone, the bad version takes five seconds
        calls = (*site.begun, *site.silent, *site.queued)
        await asyncio.gather(*(call.task for call in calls))

    assert {answered_by(call) for call in site.queued} == {"good"}
    silent, begun = map(set, (map(answered_by, site.silent), map(answered_by, site.begun)))
    if policy == "cut":
        assert {code(call) for call in site.begun} == {"version_rolled_back"}
        assert {call.failure.status for call in site.begun if call.failure} == {503}
    else:
        assert begun == {"bad"}
    assert silent == ({"bad"} if policy == "finish" else {"good"})
    assert {row.attempt for call in calls for row in call.rows} == {1}
    await site.wait_for(lambda: site.count("small/1") == site.count("small/2") == (0, 0))


async def test_a_request_that_kills_both_versions_is_a_dead_letter_and_its_mates_finish(
    site: BadRelease,
) -> None:
    await site.start()

    def supervise() -> bool:
        site.good.restart_if_dead()
        return killer.task.done()

    async with site.client() as client:
        site.bad.send(signal.SIGSTOP)  # so that all come in one batch, the killer first
        killer = Call(client, "die", deadline_s=60)
        await site.wait_for(lambda: sum(site.count("small/2")) == 1)
        mates = [Call(client, f"mate {i}", max_tokens=30, deadline_s=60) for i in range(3)]
        await site.wait_for(lambda: sum(site.count("small/2")) == 4)
        site.bad.send(signal.SIGCONT)
        assert await asyncio.to_thread(site.bad.wait) == 9
        site.roll_back()
        await site.wait_for(supervise, timeout_s=40)
        await asyncio.gather(*(call.task for call in mates))

    assert code(killer) == "request_crashed_engine"
    assert {answered_by(call) for call in mates} == {"good"}
    assert site.dead_letters() == [killer.request.id]
    assert site.good.num_starts == 3  # beside its mates, and alone
    await site.wait_for(lambda: site.count("small/1") == site.count("small/2") == (0, 0))
