"""Roles, and slots that are too few: who grows, who shrinks, who makes room. Real processes, the instant engine."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from inference.protocol import Resident, Route
from tests.inference.slot_process import LEASE_MS
from tests.inference.slot_site import RESIDENT, Call, Site

FLOOR, FULL = 1, 64
MISSING = "missing"

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


def _resident(endpoint: str, number: int, role: str, artifact: str = "/artifact") -> Resident:
    return Resident(endpoint, f"small/{number}", artifact, role=role)


async def _wait_for_blocks(site: Site, role: str, kv_blocks: int) -> None:
    def is_so() -> bool:
        return [(each.role, each.kv_blocks) for each in site.slots()] == [(role, kv_blocks)]

    await site.wait_for(is_so)


async def _wait_for_ready(site: Site, *expected: tuple[str, str]) -> None:
    def are_ready() -> bool:
        held = [(each.endpoint, each.version) for each in site.slots() if each.state == "ready"]
        return Counter(held) == Counter(expected)

    await site.wait_for(are_ready, timeout_s=30)


async def test_a_change_of_role_loads_nothing_and_ends_no_request(site: Site) -> None:
    site.publish(RESIDENT)
    slot = site.start_slot("slot-1")
    await site.wait_ready("slot-1")
    await _wait_for_blocks(site, "live", FULL)
    async with site.client() as client:
        call = Call(client, max_tokens=200)
        await call.wait_for_rows(5)
        for role in ("previous", "retired", "candidate", "live", "previous"):
            site.publish(_resident("chat", 1, role))
            await _wait_for_blocks(site, role, FULL if role in ("candidate", "live") else FLOOR)
        site.publish(RESIDENT)
        await call.task

    assert call.is_golden
    await _wait_for_blocks(site, "live", FULL)
    assert slot.read_log().count("engine probed") == 1


async def test_a_version_that_never_loads_leaves_the_slot_to_a_live_one(site: Site) -> None:
    site.publish(_resident("alpha", 1, "live", MISSING), _resident("chat", 1, "live"))
    slot = site.start_slot("slot-1")
    await _wait_for_ready(site, ("chat", "small/1"))

    assert "version is left for another to be loaded" in slot.read_log()
    async with site.client() as client:
        call = Call(client, max_tokens=5)
        await call.task
    assert call.is_golden
    # It stays out of the way, but is tried as soon as a slot has nothing better to do.
    site.start_slot("slot-2")
    await site.wait_for(lambda: any(each.endpoint == "alpha" for each in site.slots()))
    await site.wait_for(lambda: any(each.state == "failed" for each in site.slots()), timeout_s=30)
    assert [each.state for each in site.slots() if each.endpoint == "chat"] == ["ready"]


async def test_a_candidate_makes_room_for_a_live_version_without_a_slot(site: Site) -> None:
    live, previous = _resident("chat", 1, "live"), _resident("chat", 2, "previous")
    candidate, retired = _resident("chat", 3, "candidate"), _resident("chat", 4, "retired")
    site.publish(live, previous, candidate, retired)
    for number in range(4):
        site.start_slot(f"slot-{number}", TATKAL_YIELD_S="1")
    held = [("chat", f"small/{number}") for number in (1, 2, 3, 4)]
    await _wait_for_ready(site, *held)

    other = [_resident("other", number, "live") for number in (1, 2)]
    site.publish(live, other[0], previous, candidate, retired)
    await _wait_for_ready(site, *held[:3], ("other", "small/1"))
    site.publish(live, *other, previous, candidate, retired)
    await _wait_for_ready(site, *held[:2], ("other", "small/1"), ("other", "small/2"))

    # A previous version is the way back: it makes room for nobody.
    site.publish(live, *other, _resident("third", 1, "live"), previous)
    await asyncio.sleep(2.5)
    await _wait_for_ready(site, *held[:2], ("other", "small/1"), ("other", "small/2"))


async def test_a_process_that_comes_back_in_time_finds_its_version(site: Site) -> None:
    site.publish(RESIDENT, _resident("chat", 2, "candidate"))
    first = site.start_slot("slot-1", TATKAL_YIELD_S="15")
    await site.wait_ready("slot-1")
    site.start_slot("slot-2", TATKAL_YIELD_S="15")
    await site.wait_ready("slot-2", version="small/2")

    first.__exit__()
    first.start()

    await _wait_for_ready(site, ("chat", "small/1"), ("chat", "small/2"))
    assert {each.slot: each.version for each in site.slots()} == {
        "slot-1": "small/1",
        "slot-2": "small/2",
    }


@pytest.mark.parametrize("loss", ["emptied", "restarted"])
async def test_an_idle_slot_takes_nothing_from_those_who_hold_it(own_site: Site, loss: str) -> None:
    # Whoever holds something has one lease to say so. On a busy machine the short one of the other tests may pass
    # before a process was given the processor at all.
    lease_ms = "2000"
    own_site.publish(RESIDENT)
    first = own_site.start_slot("slot-1", TATKAL_LEASE_MS=lease_ms)
    await own_site.wait_ready("slot-1")
    idle = own_site.start_slot("slot-2", TATKAL_LEASE_MS=lease_ms)
    await own_site.wait_for(lambda: len(own_site.slots()) == 2)
    for _ in range(3):
        if loss == "emptied":
            own_site.flush()
            await asyncio.sleep(0.3)
            own_site.queue.apply_route(Route("chat", "a", 1, live="small/1"))
            own_site.publish(RESIDENT)
        else:
            await asyncio.sleep(1.1)  # appendfsync everysec: what is older survives
            own_site.server.kill()
            await asyncio.sleep(2 * LEASE_MS / 1000)
            own_site.server.start()
        await asyncio.sleep(2.5)
        await own_site.wait_ready("slot-1")

    assert first.read_log().count("engine probed") == 1
    assert "engine probed" not in idle.read_log()


async def test_a_version_that_is_asked_before_its_role_changes_is_no_standby(site: Site) -> None:
    """The route is there at once, the role within a second: nobody waits for the latter."""
    site.publish(_resident("chat", 1, "previous"))
    site.start_slot("slot-1")
    await site.wait_ready("slot-1")
    site.queue.apply_route(Route("chat", "a", 2, live="small/1"))
    async with site.client() as client:
        calls = [Call(client, max_tokens=10) for _ in range(20)]
        await asyncio.gather(*(call.task for call in calls))

    assert all(call.is_golden for call in calls)
