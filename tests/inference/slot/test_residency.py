"""What a role is worth in memory, and for how long a slot keeps what is needed less than another version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from inference.engine.loop import EngineLoop
from inference.protocol import QueueEntry, Resident
from inference.queue import Adoption, Delivery, Lane, Queue
from inference.replicas import Member
from inference.slot import residency as residency_module
from inference.slot.residency import SHORT_OF_MEMORY, Residency
from tests.inference.instant_engine import InstantEngine

LANE = Lane("chat", "small/1")
RESIDENT = Resident("chat", "small/1", "/artifact")


@dataclass
class Bench:
    """A residency whose loop does not run: the test is its engine thread."""

    residency: Residency
    engine: InstantEngine
    loop: EngineLoop
    member: Member

    @property
    def is_standby(self) -> bool:
        """What the engine was last told."""
        self.residency.fit()
        return self.engine.num_blocks == 1

    def change_role(self, role: str) -> None:
        """As if the desired state named another."""
        assert self.residency.follow(Adoption(replace(RESIDENT, role=role)), yield_s=1)

    def deliver(self, request_id: str) -> None:
        """A request that arrives now and runs until the test is over."""
        now_ms = int(self.member.clock.to_server(time.monotonic()) * 1000) + 1
        entry = QueueEntry(request_id, "", now_ms, now_ms + 60_000, 1, "live")
        self.loop.take([Delivery(request_id, 1, entry)], self.member.consumer)


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    with Queue(redis_url) as queue:
        member = Member(queue, "slot-1", lease_ms=60_000)
        engine = InstantEngine()
        loop = EngineLoop(engine, queue, LANE, member)
        yield Bench(Residency(RESIDENT, engine, loop, member, oom_score=0), engine, loop, member)


@pytest.mark.parametrize("role", ["previous", "retired", "candidate"])
def test_a_version_that_nobody_asks_is_a_standby(bench: Bench, role: str) -> None:
    assert not bench.is_standby
    bench.change_role(role)
    assert bench.is_standby
    bench.change_role("live")
    assert not bench.is_standby


@pytest.mark.parametrize("role", ["previous", "retired"])
def test_requests_from_before_the_change_may_end_on_a_standby(bench: Bench, role: str) -> None:
    bench.deliver("old")
    time.sleep(0.01)
    bench.change_role(role)
    assert bench.is_standby


@pytest.mark.parametrize("role", ["previous", "retired", "candidate"])
def test_whoever_is_asked_is_no_standby_whatever_its_role(bench: Bench, role: str) -> None:
    bench.change_role(role)
    bench.deliver("new")
    bench.change_role(role)
    assert not bench.is_standby


def test_a_candidate_keeps_its_cache_between_the_requests_of_a_canary(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.change_role("candidate")
    bench.deliver("canary")
    bench.change_role("candidate")
    bench.loop.untake(bench.loop.tickets())
    bench.change_role("candidate")
    assert not bench.is_standby

    monkeypatch.setattr(residency_module, "CANDIDATE_IDLE_S", 0.0)
    assert bench.is_standby


def test_a_live_version_says_what_it_lacks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InstantEngine, "resize_kv", lambda self, *, is_standby: False)
    bench.residency.fit()
    assert bench.member.status.detail == SHORT_OF_MEMORY
    bench.change_role("previous")
    bench.residency.fit()
    assert bench.member.status.detail == ""


def test_a_slot_is_kept_until_it_was_needed_elsewhere_for_long(bench: Bench) -> None:
    needed = Adoption(replace(RESIDENT, role="candidate"), is_needed_elsewhere=True)
    assert bench.residency.follow(needed, yield_s=0.05)
    time.sleep(0.06)
    assert bench.residency.follow(replace(needed, is_needed_elsewhere=False), yield_s=0.05)
    assert bench.residency.follow(needed, yield_s=0.05)
    time.sleep(0.06)
    assert not bench.residency.follow(needed, yield_s=0.05)


def test_what_is_not_desired_any_more_is_let_go(bench: Bench) -> None:
    assert not bench.residency.follow(Adoption(), yield_s=1)
