"""Real engine processes, real signals, a real Redis: every request ends in its whole answer or a visible error."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from celery import Celery

from inference.client import NoReadySlot
from inference.protocol import Resident
from tests.inference.slot_process import LEASE_MS
from tests.inference.slot_site import RESIDENT, STEP_S, Call, Site

pytestmark = pytest.mark.asyncio


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
