"""What the machine of routes does with copies, and what must be true of them at any moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from inference.protocol import Answer, Route
from inference.queue import FinishedCopy, Lane, TakenCopy
from tests.inference.lane_bench import LaneBench

MAX_COPIES = 32


class CopyRules(RuleBasedStateMachine):
    """Slots take and answer copies beside their requests; ``RouteMachine`` has the routes and the crashes."""

    bench: LaneBench
    stands: dict[str, Route]
    consumers: dict[Lane, str]

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Lane, str, TakenCopy]] = []
        self.num_copies_answered = 0

    @rule(data=st.data(), count=st.integers(1, 4), is_idle=st.booleans())
    def take_copies(self, data: st.DataObject, count: int, is_idle: bool) -> None:
        lanes = sorted(self.consumers, key=str)
        asked = [each for each in lanes if self.bench.redis.xlen(each.key("low"))]
        self.take_from(data.draw(st.sampled_from(asked or lanes)), count, is_idle=is_idle)

    def take_from(self, lane: Lane, count: int, *, is_idle: bool) -> None:
        """What the slot of a lane does now and then."""
        consumer = self.consumers[lane]
        is_waited = any(not each.consumer for each in self.bench.standing() if each.lane == lane)
        taken, _ = self.bench.queue.take_copies(lane, consumer, count, is_idle=is_idle)
        assert not (taken and is_waited), "a copy went before a request"
        assert len(taken) == 1 or all(each.delivery.attempt == 1 for each in taken)
        self.taken += [(lane, consumer, each) for each in taken]

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), is_dropped=st.booleans())
    def answer_a_copy(self, data: st.DataObject, is_dropped: bool) -> None:
        """Perhaps of a slot that lost it, or for the second time."""
        lane, consumer, taken = data.draw(st.sampled_from(self.taken))
        entry = taken.delivery.entry
        is_held = self._is_held(lane, consumer, taken)
        answer = Answer(entry.id, entry.arm, lane.endpoint, "", 1, entry.rollout, "", "ok", 0.0)
        finished = FinishedCopy(
            taken.delivery, replace(answer, dropped="late" if is_dropped else "")
        )
        written = self.bench.queue.answer_copies(lane, consumer, [finished])
        assert written == is_held
        self.num_copies_answered += written

    def check_copies(self) -> None:
        """Every copy stands once, in the low lane of a version that the route wants it from, and nowhere else."""
        counts: Counter[str] = Counter()
        for key in self.bench.redis.scan_iter("low:*", count=1_000):
            _, endpoint, version = key.split(":")
            entries = self.bench.redis.xrange(key)
            assert len(entries) <= MAX_COPIES
            for _, fields in entries:
                counts[fields["id"]] += 1
                assert _is_asked_for(self.stands[endpoint], version, fields), "a copy was left"
        assert not counts or max(counts.values()) == 1, "a copy stands twice"
        bodies = {key.removeprefix("req:") for key in self.bench.redis.scan_iter("req:*~*")}
        assert bodies == set(counts), "a body without its copy, or a copy without its body"
        told = Counter(half.answer.copy_of for half in self.bench.queue.read_answers())
        assert not told or max(told.values()) == 1, "a copy was answered twice"
        assert told.total() == self.num_copies_answered
        assert not set(told) & set(counts), "a copy was answered and is still there"

    def _is_held(self, lane: Lane, consumer: str, taken: TakenCopy) -> bool:
        if self.bench.redis.exists(f"fenced:{consumer}"):
            return False
        pending: Any = self.bench.redis.xpending_range(
            lane.key("low"), "slots", taken.delivery.entry_id, taken.delivery.entry_id, 1
        )
        return bool(pending) and pending[0]["consumer"] == consumer


def with_copies(route: Route) -> Route:
    """The route while a rollout holds its candidate, or without one."""
    if not route.candidate:
        return replace(route, rollout="", shadow_bp=0, self_bp=0)
    return replace(route, rollout=f"r-{route.candidate}", shadow_bp=8_000, self_bp=5_000)


def _is_asked_for(route: Route, version: str, fields: dict[str, str]) -> bool:
    wanted = route.live if fields["arm"] == "self" else route.candidate
    return (version, fields["rollout"]) == (wanted, route.rollout)
