"""No order of routes, requests, crashes, claims and rescues loses a request, runs one twice at once, or ends one twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inference.protocol import Route
from inference.queue import Delivery, Lane, control
from tests.inference.copy_rules import CopyRules, with_copies
from tests.inference.lane_bench import LaneBench, Standing, route

ENDPOINTS = ("chat", "code")  # on the same versions
VERSIONS = ("small/1", "small/2", "small/3")
POLICIES = ("finish", "retry_if_no_token", "cut")


class RouteMachine(CopyRules):
    """Two endpoints, a slot for each of their lanes, and after every step a look at all of Redis."""

    url: str

    @initialize()
    def start(self) -> None:
        self.bench = LaneBench(self.url)
        self.bench.redis.flushall()
        self.database = {name: [route("small/1", endpoint=name)] for name in ENDPOINTS}
        self.stands = {name: self.database[name][0] for name in ENDPOINTS}
        self.consumers: dict[Lane, str] = {}
        self.hands: dict[Lane, dict[str, Delivery]] = {}
        self.lost: list[tuple[Lane, str, Delivery]] = []
        self.born: dict[str, Standing] = {}
        self.tries: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.cancelled: set[str] = set()
        self.num_names = 0
        for endpoint in ENDPOINTS:
            self.bench.queue.apply_route(self.stands[endpoint])
            for version in VERSIONS:
                self._join(Lane(endpoint, version))

    def teardown(self) -> None:
        """Whatever happened: the newest route, applied once more, and one live slot bring everything to its end."""
        if hasattr(self, "bench"):
            with self.bench:
                for endpoint in ENDPOINTS:
                    self._finish(endpoint)

    # --------------------------------------------------------------------------------------------- the database

    @rule(
        endpoint=st.sampled_from(ENDPOINTS),
        live=st.sampled_from(VERSIONS),
        candidate=st.sampled_from(("", *VERSIONS)),
        canary_bp=st.sampled_from((0, 5_000, 10_000)),
        published=st.sampled_from(("", *POLICIES)),
    )
    def change_the_route(
        self, endpoint: str, live: str, candidate: str, canary_bp: int, published: str
    ) -> None:
        """Not ``published``: for now, or for ever; else with that policy."""
        if candidate == live or not candidate:
            candidate, canary_bp = "", 0
        newest = self.database[endpoint][-1]
        changed = replace(newest, generation=newest.generation + 1, live=live)
        changed = replace(changed, candidate=candidate, canary_bp=canary_bp)
        self.database[endpoint].append(with_copies(changed))
        if published:
            self.apply(endpoint, 0, published)

    @rule(endpoint=st.sampled_from(ENDPOINTS), canary_bp=st.sampled_from((0, 5_000, 10_000)))
    def change_the_share(self, endpoint: str, canary_bp: int) -> None:
        newest = self.database[endpoint][-1]
        if newest.candidate:
            changed = replace(newest, generation=newest.generation + 1, canary_bp=canary_bp)
            self.database[endpoint].append(changed)
            self.apply(endpoint, 0, "finish")

    @rule(endpoint=st.sampled_from(ENDPOINTS), live=st.sampled_from(VERSIONS))
    def restore_the_database(self, endpoint: str, live: str) -> None:
        """A new incarnation begins only where the older one was seen in Redis."""
        newest, stands = self.database[endpoint][-1], self.stands[endpoint]
        if newest.incarnation == stands.incarnation:
            incarnation = f"{newest.incarnation}+"
            self.database[endpoint].append(route(live, endpoint=endpoint, incarnation=incarnation))

    @rule(
        endpoint=st.sampled_from(ENDPOINTS),
        back=st.integers(0, 5),
        policy=st.sampled_from(POLICIES),
    )
    def apply(self, endpoint: str, back: int, policy: str) -> None:
        """Any route that ever was: late, repeated, or never."""
        applied = self.database[endpoint][-1 - min(back, len(self.database[endpoint]) - 1)]
        before, told = self.bench.standing(), self._count_told(endpoint)
        result = self.bench.queue.apply_route(applied, in_flight=policy)
        is_newer = _order(applied) >= _order(self.stands[endpoint])
        assert result.is_current == is_newer
        now_told = {lane for lane, num in self._count_told(endpoint).items() if num > told[lane]}
        assert now_told == (self._running_on_lost(applied) if policy != "finish" else set())
        if is_newer:
            self.stands[endpoint] = applied
        else:
            assert self.bench.standing() == before
        self._check()

    # --------------------------------------------------------------------------------------- requests and slots

    @rule(endpoint=st.sampled_from(ENDPOINTS), num=st.integers(1, 4))
    def enqueue(self, endpoint: str, num: int) -> None:
        for _ in range(num):
            request_id = self._name("r")
            stands = self.stands[endpoint]
            version = self.bench.enqueue(request_id, endpoint=endpoint, user=request_id).version
            assert version in {stands.live, stands.candidate if stands.canary_bp else stands.live}
            self.born[request_id] = self._find(request_id)
        self._check()

    @rule(data=st.data(), count=st.integers(1, 5))
    def pull(self, data: st.DataObject, count: int) -> None:
        lane = data.draw(st.sampled_from(sorted(self.consumers, key=str)))
        self._hold(lane, self.bench.pull(lane, self.consumers[lane], count))
        self._check()

    @rule(data=st.data(), count=st.integers(1, 8))
    def claim(self, data: st.DataObject, count: int) -> None:
        lane = data.draw(st.sampled_from(sorted(self.consumers, key=str)))
        claimed = self.bench.claim(lane, self.consumers[lane], count)
        if any(each.attempt == 3 for each in claimed):
            assert len(claimed) == 1
        self._hold(lane, claimed)
        self._check()

    @rule(data=st.data())
    def rescue(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.consumers, key=str)))
        before = self.bench.standing()
        self.bench.queue.rescue(lane, "slot", "fp")
        stands = self.stands[lane.endpoint]
        moved = {each for each in before if each not in self.bench.standing()}
        assert not moved or lane.version == stands.live
        assert not {each.consumer for each in moved} & set(self.consumers.values())
        assert not any(_is_routed(stands, each.lane) for each in moved)
        self._check()

    @precondition(lambda self: any(self.hands.values()))
    @rule(data=st.data(), is_returned=st.booleans())
    def finish_or_return(self, data: st.DataObject, is_returned: bool) -> None:
        lane = data.draw(st.sampled_from([lane for lane, held in self.hands.items() if held]))
        request_id = data.draw(st.sampled_from(sorted(self.hands[lane])))
        delivery = self.hands[lane].pop(request_id)
        if is_returned:
            self.tries[request_id] -= 1
            self.bench.queue.send(lane, self.consumers[lane], {}, returned=[delivery])
        else:
            self.ended.add(request_id)
            self.bench.queue.send(lane, self.consumers[lane], {}, ended=[delivery])
        self._check()

    @precondition(lambda self: self.lost)
    @rule(data=st.data(), is_returned=st.booleans())
    def wake_a_zombie(self, data: st.DataObject, is_returned: bool) -> None:
        """A slot that lost its lease may still say that it ended or returned what it had."""
        self._wake(*data.draw(st.sampled_from(self.lost)), is_returned)

    @rule(data=st.data(), is_quick=st.booleans())
    def crash(self, data: st.DataObject, is_quick: bool) -> None:
        """A slot dies with all it has, and is back under a new name, perhaps at once."""
        lane = data.draw(st.sampled_from(sorted(self.consumers, key=str)))
        self._lose_lease(lane)
        self._join(lane)
        if is_quick:
            self._hold(lane, self.bench.claim(lane, self.consumers[lane]))
            self._wake_all()
            self._check()

    @rule(endpoint=st.sampled_from(ENDPOINTS), live=st.sampled_from(VERSIONS))
    def roll_back_from_a_hang(self, endpoint: str, live: str) -> None:
        """All slots of the version that was live hang with what they have, and the next one looks after it."""
        hung = Lane(endpoint, self.stands[endpoint].live)
        self.change_the_route(endpoint, live, "", 0, "finish")
        if hung.version != live:
            self._lose_lease(hung)
            self.bench.queue.rescue(Lane(endpoint, live), "slot", "fp")
            self._check()
            self._join(hung)

    @rule(endpoint=st.sampled_from(ENDPOINTS), policy=st.sampled_from(POLICIES))
    def change_twice_while_requests_run(self, endpoint: str, policy: str) -> None:
        """The first of two changes lets them finish where they are, and the second is of another mind."""
        for each in ("finish", policy):
            live = self.stands[endpoint].live
            self.enqueue(endpoint, 1)
            lane = Lane(endpoint, live)
            self._hold(lane, self.bench.pull(lane, self.consumers[lane]))
            other = VERSIONS[VERSIONS.index(live) - 1]
            self.change_the_route(endpoint, other, "", 0, each)

    @rule(endpoint=st.sampled_from(ENDPOINTS), num=st.integers(1, 4), is_pulled=st.booleans())
    def compare_a_candidate(self, endpoint: str, num: int, is_pulled: bool) -> None:
        """A rollout begins, requests come, and the slots of both versions look for copies."""
        live = self.stands[endpoint].live
        candidate = VERSIONS[VERSIONS.index(live) - 1]
        self.change_the_route(endpoint, live, candidate, 0, "finish")
        self.enqueue(endpoint, num)
        for lane in (Lane(endpoint, live), Lane(endpoint, candidate)):
            if is_pulled:
                self._hold(lane, self.bench.pull(lane, self.consumers[lane]))
            self.take_from(lane, num, is_idle=not is_pulled)
        self._check()

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._unfinished()))
        was_waiting = not self._find(request_id).consumer
        assert self.bench.cancel(request_id) == was_waiting
        self.cancelled.add(request_id)
        if was_waiting:
            assert request_id not in {each.entry.id for each in self.bench.standing()}
        self._check()

    # ---------------------------------------------------------------------------------------------------- checks

    def _count_told(self, endpoint: str) -> dict[Lane, int]:
        """How often the slots of each lane were told what becomes of what they run."""
        lanes = [Lane(endpoint, version) for version in VERSIONS]
        notices = {lane: self.bench.redis.xrange(lane.key("ctl")) for lane in lanes}
        return {lane: sum("in_flight" in each for _, each in notices[lane]) for lane in lanes}

    def _running_on_lost(self, applied: Route) -> set[Lane]:
        """Lanes that had a route until ``applied`` came, have none now, and still run something."""
        stands = self.stands[applied.endpoint]
        if _order(applied) < _order(stands):
            return set()
        return {
            each.lane
            for each in self.bench.standing()
            if each.lane.endpoint == applied.endpoint
            and _is_routed(stands, each.lane)
            and not _is_routed(applied, each.lane)
        }

    def _check(self) -> None:
        """What must be true at any moment."""
        self.check_copies()
        standing = self.bench.standing()
        for endpoint in ENDPOINTS:
            assert self.bench.queue.read_route(endpoint) == self.stands[endpoint]
        counts = Counter(each.entry.id for each in standing)
        unfinished = set(self._unfinished())
        assert not counts or max(counts.values()) == 1, "a request stands twice"
        assert set(counts) - self.cancelled == unfinished, "a request is lost, or ended and there"
        for each in standing:
            born = self.born[each.entry.id]
            assert each.lane.endpoint == born.lane.endpoint, "a request left its endpoint"
            assert replace(each.entry, attempt=0) == born.entry, "a request was changed on its way"
            assert each.consumer or _is_routed(self.stands[each.lane.endpoint], each.lane), (
                "a request waits where nobody looks"
            )
        ours = [each for each in standing if each.entry.id in unfinished]
        assert self.bench.where(*(each.entry.id for each in ours)) == [
            (f"{each.lane.endpoint}:{each.lane.version}", each.entry_id) for each in ours
        ]

    def _finish(self, endpoint: str) -> None:
        newest = self.database[endpoint][-1]
        assert self.bench.queue.apply_route(newest).is_current
        assert self.bench.queue.read_route(endpoint) == newest
        self.stands[endpoint] = with_copies(replace(newest, candidate="", canary_bp=0))
        settled = replace(self.stands[endpoint], generation=newest.generation + 1)
        self.bench.queue.apply_route(settled)
        lane = Lane(endpoint, newest.live)
        for each in [each for each in self.consumers if each.endpoint == endpoint]:
            self.bench.crash(self.consumers[each])
            self.hands[each] = {}
        self._join(lane)
        while any(each.lane.endpoint == endpoint for each in self.bench.standing()):
            consumer = self.consumers[lane]
            self.bench.queue.rescue(lane, "slot", "fp")
            self._hold(lane, self.bench.pull(lane, consumer) + self.bench.claim(lane, consumer))
            held = self.hands[lane]
            assert held, "what is left is never handed out"
            assert not self.ended & set(held), "a request is answered twice"
            self.bench.queue.send(lane, consumer, {}, ended=list(held.values()))
            self.ended |= set(held)
            self.hands[lane] = {}
        ours = {name for name, born in self.born.items() if born.lane.endpoint == endpoint}
        assert ours <= self.ended | self.cancelled

    def _join(self, lane: Lane) -> None:
        name = self._name(f"slot-{lane.endpoint}-{lane.version.replace('/', '-')}.")
        self.consumers[lane] = self.bench.join(lane, name)
        self.hands[lane] = {}

    def _lose_lease(self, lane: Lane) -> None:
        consumer = self.consumers[lane]
        self.bench.crash(consumer)
        self.lost = [(lane, consumer, delivery) for delivery in self.hands[lane].values()]

    def _wake_all(self) -> None:
        for number, (lane, consumer, delivery) in enumerate(self.lost):
            self._wake(lane, consumer, delivery, number % 2 == 0)

    def _wake(self, lane: Lane, consumer: str, delivery: Delivery, is_returned: bool) -> None:
        before = self.bench.standing()
        if (lane, delivery.entry_id, consumer) not in {
            (each.lane, each.entry_id, each.consumer) for each in before
        }:
            key = "returned" if is_returned else "ended"
            self.bench.queue.send(lane, consumer, {}, **{key: [delivery]})
            assert self.bench.standing() == before, "what was lost was ended or returned"

    def _hold(self, lane: Lane, deliveries: list[Delivery]) -> None:
        for each in deliveries:
            self.tries[each.entry.id] += 1
            assert each.attempt == self.tries[each.entry.id], "an attempt was lost or made up"
            self.hands[lane][each.entry.id] = each

    def _find(self, request_id: str) -> Standing:
        (found,) = [each for each in self.bench.standing() if each.entry.id == request_id]
        return found

    def _unfinished(self) -> list[str]:
        return sorted(set(self.born) - self.ended - self.cancelled)

    def _name(self, prefix: str) -> str:
        self.num_names += 1
        return f"{prefix}{self.num_names}"


def _order(route: Route) -> tuple[int, int]:
    return len(route.incarnation), route.generation


def _is_routed(route: Route, lane: Lane) -> bool:
    return lane.version == route.live or (lane.version == route.candidate and route.canary_bp > 0)


@pytest.mark.slow
def test_no_order_of_events_breaks_a_promise(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LATE_S", 600)
    machine = type("Machine", (RouteMachine,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
