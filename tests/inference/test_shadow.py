"""A candidate's process under a shadow of real traffic: whatever it does, nobody who asked notices."""

from __future__ import annotations

import asyncio

import pytest

from inference.protocol import Answer, Resident, Route
from inference.queue import Lane
from tests.inference.slot_site import Call, Site

CANDIDATE = Lane("chat", "small/2")
SHADOWED = Route(
    "chat", "a", 2, "small/1", candidate="small/2", rollout="ro", salt="s", shadow_bp=10_000
)


def answers(site: Site) -> dict[str, Answer]:
    return {half.answer.copy_of: half.answer for half in site.queue.read_answers()}


@pytest.mark.slow
async def test_a_copy_that_kills_the_candidate_is_its_failure_and_hurts_nobody(site: Site) -> None:
    residents = [
        Resident("chat", "small/1", "/a"),
        Resident("chat", "small/2", "/b", {}, "candidate"),
    ]
    site.publish(residents[0])
    live = site.start_slot("slot-live")
    await site.wait_ready("slot-live")
    site.publish(*residents)
    bad = site.start_slot("slot-bad", TATKAL_ENGINE="tests.inference.fragile_engine:load")
    await site.wait_ready("slot-bad", version="small/2")
    site.queue.apply_route(SHADOWED)

    async with site.client() as client:
        calls = [Call(client, "fragile" if n == 3 else "Hello", max_tokens=20) for n in range(8)]
        names = [call.request.id for call in calls]
        async with asyncio.timeout(60):
            while set(answers(site)) != set(names):
                await asyncio.to_thread(bad.restart_if_dead)
                await asyncio.sleep(0.1)
        await asyncio.gather(*(call.task for call in calls))

    assert all(call.is_golden for call in calls)
    outcomes = {name: answers(site)[name].outcome for name in names}
    assert outcomes.pop(names[3]) == "request_crashed_engine"
    assert set(outcomes.values()) == {"ok"}
    assert {answers(site)[name].fingerprint for name in outcomes} == {"fragile"}
    assert (live.num_starts, bad.num_starts) == (1, 3)
    assert (site.num_left(), site.dead_letters()) == (0, [])
