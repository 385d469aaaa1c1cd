"""Real engine processes, real signals, a real Redis: every request ends in its whole answer or a visible error."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import redis
from celery import Celery

from inference.client import Client, NoReadySlot
from inference.config import InvalidConfig
from inference.protocol import Failure, GenerateRequest, Resident, Route, SamplingParams, TokenRow
from inference.queue import Lane, Queue
from inference.replicas import SlotStatus, list_slots
from inference.worker import SlotConfig
from tests.inference.instant_engine import golden_text
from tests.inference.slot_process import LEASE_MS, SlotProcess, wait_until
from tests.redis_server import RedisServer

LANE = Lane("chat", "small/1")
RESIDENT = Resident("chat", "small/1", "/artifact")
STEP_S = 0.02

pytestmark = pytest.mark.asyncio

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


@pytest.fixture
def site(redis_server: RedisServer, redis_url: str, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(redis_server, tmp_path, stack)


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """One whose Redis may be killed."""
    with ExitStack() as stack:
        directory = tmp_path / "redis"
        directory.mkdir()
        yield Site(stack.enter_context(RedisServer(directory)), tmp_path, stack)


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


@pytest.mark.slow
async def test_many_requests_get_their_whole_answers(site: Site) -> None:
    site.publish(RESIDENT)
    site.start_slot("slot-1")
    await site.wait_ready("slot-1")
    async with site.client() as client:
        calls = [Call(client, max_tokens=number) for number in range(1, 41)]
        await asyncio.gather(*(call.task for call in calls))

    assert all(call.is_golden for call in calls)
    await site.wait_for(lambda: site.num_left() == 0)


@pytest.mark.slow
async def test_a_slot_answers_on_its_own_control_queue(site: Site) -> None:
    slot = site.start_slot("slot-1")
    with Celery(broker=site.server.url, fixups=[]) as control:
        control.send_task("slot.status", queue="slot.slot-1")
        await site.wait_for(lambda: "succeeded" in slot.read_log())

    assert [each.state for each in site.slots()] == ["waiting"]


@pytest.mark.slow
async def test_a_killed_slots_requests_are_completed_by_another(site: Site) -> None:
    site.publish(RESIDENT, RESIDENT)
    first = site.start_slot("slot-1")
    await site.wait_ready("slot-1")
    async with site.client() as client:
        calls = [Call(client, max_tokens=100) for _ in range(6)]
        await asyncio.gather(*(call.wait_for_rows(5) for call in calls))
        site.start_slot("slot-2")
        await site.wait_ready("slot-2")
        first.send(signal.SIGKILL)
        killed_at = time.monotonic()
        await site.wait_for(lambda: any(row.attempt == 2 for call in calls for row in call.rows))
        recovered_s = time.monotonic() - killed_at
        await asyncio.gather(*(call.task for call in calls))

    assert all(call.is_golden for call in calls)
    # The lease ends, the heir looks every half second, and catches up with what was sent already.
    assert recovered_s < LEASE_MS / 1000 + 1.0 + 100 * STEP_S


@pytest.mark.slow
async def test_a_poisonous_request_is_a_dead_letter_and_its_batch_mates_finish(site: Site) -> None:
    site.publish(RESIDENT)
    slot = site.start_slot("slot-1")
    await site.wait_ready("slot-1")

    def supervise() -> bool:
        slot.restart_if_dead()
        return poison.task.done()

    async with site.client() as client:
        slot.send(signal.SIGSTOP)  # so that all come in one batch, the poisonous one first
        poison = Call(client, "poison", deadline_s=60)
        await site.wait_for(lambda: site.num_left() == 1)
        mates = [Call(client, max_tokens=30, deadline_s=60) for _ in range(3)]
        await site.wait_for(lambda: site.num_left() == 4)
        slot.send(signal.SIGCONT)
        await site.wait_for(supervise, timeout_s=40)
        await asyncio.gather(*(call.task for call in mates))

    assert poison.failure is not None
    assert (poison.failure.code, poison.failure.status) == ("request_crashed_engine", 500)
    assert all(call.is_golden for call in mates)
    assert site.dead_letters() == [poison.request.id]
    assert slot.num_starts == 4


@pytest.mark.slow
async def test_a_restart_of_redis_costs_time_and_no_token(own_site: Site) -> None:
    own_site.publish(RESIDENT)
    own_site.start_slot("slot-1")
    await own_site.wait_ready("slot-1")
    async with own_site.client() as client:
        calls = [Call(client, max_tokens=150) for _ in range(4)]
        await asyncio.gather(*(call.wait_for_rows(5) for call in calls))
        await asyncio.sleep(1.1)  # appendfsync everysec: what is older survives
        own_site.server.kill()
        await asyncio.sleep(2 * LEASE_MS / 1000)
        own_site.server.start()
        await asyncio.gather(*(call.task for call in calls))

    assert all(call.is_golden for call in calls)
    assert {row.attempt for call in calls for row in call.rows} == {1}


@pytest.mark.slow
async def test_sigterm_finishes_what_runs_and_takes_nothing_new(site: Site) -> None:
    site.publish(RESIDENT)
    slot = site.start_slot("slot-1")
    await site.wait_ready("slot-1")
    async with site.client() as client:
        call = Call(client, max_tokens=100)
        await call.wait_for_rows(5)
        slot.send(signal.SIGTERM)
        await site.wait_for(lambda: all(each.state != "ready" for each in site.slots()))
        late = Call(client)
        with pytest.raises(NoReadySlot):
            await late.task
        await call.task

    assert call.is_golden
    assert slot.wait() == 0
    assert site.slots() == []


@pytest.mark.slow
async def test_what_outlasts_the_drain_ends_with_a_visible_error(site: Site) -> None:
    site.publish(RESIDENT)
    slot = site.start_slot("slot-1", TATKAL_DRAIN_S="0")
    await site.wait_ready("slot-1")
    async with site.client() as client:
        call = Call(client, max_tokens=10_000)
        await call.wait_for_rows(5)
        slot.send(signal.SIGTERM)
        await call.task

    assert call.failure is not None
    assert (call.failure.code, call.failure.status) == ("server_shutting_down", 503)
    assert slot.wait() == 0


@pytest.mark.slow
async def test_a_slot_that_sleeps_through_its_lease_does_no_harm(site: Site) -> None:
    site.publish(RESIDENT, RESIDENT)
    zombie = site.start_slot("slot-1")
    await site.wait_ready("slot-1")
    async with site.client() as client:
        calls = [Call(client, max_tokens=150) for _ in range(4)]
        await asyncio.gather(*(call.wait_for_rows(5) for call in calls))
        site.start_slot("slot-2")
        await site.wait_ready("slot-2")
        zombie.send(signal.SIGSTOP)
        await site.wait_for(lambda: all(call.rows[-1].attempt == 2 for call in calls))
        zombie.send(signal.SIGCONT)
        await asyncio.gather(*(call.task for call in calls))
        await site.wait_ready("slot-1", "slot-2")
        again = [Call(client, max_tokens=10) for _ in range(8)]
        await asyncio.gather(*(call.task for call in again))

    assert all(call.is_golden for call in calls + again)
    assert "lease lost" in zombie.read_log()
    await site.wait_for(lambda: site.num_left() == 0)


@pytest.mark.slow
async def test_a_slot_whose_step_hangs_exits(site: Site) -> None:
    site.publish(RESIDENT)
    slot = site.start_slot("slot-1", TATKAL_STALL_S="1")
    await site.wait_ready("slot-1")
    async with site.client() as client:
        call = Call(client, "hang", deadline_s=1.0)
        assert await asyncio.to_thread(slot.wait) == 1
        await call.task

    assert call.failure is not None
    assert call.failure.code == "deadline_exceeded"
    assert "made no progress" in slot.read_log()


@pytest.mark.slow
async def test_a_version_that_cannot_be_loaded_is_reported_and_let_go(site: Site) -> None:
    site.publish(Resident("chat", "small/1", "missing"))
    slot = site.start_slot("slot-1")
    await site.wait_for(lambda: any(each.state == "failed" for each in site.slots()))
    assert "FileNotFoundError: artifact 'missing' is not there" in site.slots()[0].detail

    site.publish(RESIDENT)
    await site.wait_ready("slot-1")
    assert slot.num_starts == 1

    site.publish(Resident("chat", "small/2", "/other"))
    await site.wait_ready("slot-1", version="small/2")
    site.publish()
    await site.wait_for(lambda: [each.state for each in site.slots()] == ["waiting"])


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({}, "TATKAL_SLOT"),
        ({"TATKAL_SLOT": "slot 1", "REDIS_URL": "redis://x"}, "TATKAL_SLOT"),
        ({"TATKAL_SLOT": "slot-1"}, "REDIS_URL"),
        (
            {"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_LEASE_MS": "fast"},
            "TATKAL_LEASE_MS",
        ),
        ({"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_STALL_S": "0"}, "TATKAL_STALL_S"),
    ],
)
async def test_a_malformed_setting_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        SlotConfig.from_env(env)
