"""How far a rollout is: steps with their phase, their share and their expected time, and one sentence that says why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.rollouts import services
from controlplane.rollouts.copies import worst_pairs_of
from controlplane.rollouts.gate_rows import GateRow
from controlplane.rollouts.models import Rollout, Step
from controlplane.rollouts.progress import Expected, StepProgress, steps_of, tell_why
from controlplane.rollouts.timeline import UnknownEvent, annotate, timeline_of
from controlplane.rollouts.words import duration, gate_line, step_line
from inference.queue import Queue
from tests.controlplane.rollouts.world import DOCUMENT, World
from tests.factories import NOW, make_endpoint, make_rollout, make_version

pytestmark = pytest.mark.django_db
DECLARED = [{"segment": {}, "per_hour": 4000}, {"segment": {"lang": "hi"}, "per_hour": 400}]


def a_rollout(**fields: Any) -> Rollout:
    """Rows alone: nothing ran."""
    endpoint = make_endpoint("chat")
    return make_rollout(endpoint, make_version(), document=DOCUMENT, **fields)


def stay(rollout: Rollout, index: int, kind: str, **fields: Any) -> None:
    Step.objects.create(rollout=rollout, index=index, kind=kind, entered_at=NOW, **fields)


def steps(rollout: Rollout, seconds: float = 0) -> list[StepProgress]:
    return steps_of(
        Rollout.objects.with_names().get(pk=rollout.pk), NOW + timedelta(seconds=seconds)
    )


def test_a_forced_promotion_skips_the_steps_between() -> None:
    rollout = a_rollout(step_index=2, state="baking", is_forced=True, promoted_at=NOW)
    stay(rollout, 0, "shadow", left_at=NOW, outcome="force")
    stay(rollout, 2, "bake")
    assert [(step.kind, step.phase) for step in steps(rollout, 15)[1:]] == [
        ("shadow", "done"), ("canary", "skipped"), ("bake", "current"),
    ]  # fmt: skip
    assert steps(rollout, 15)[3].share == pytest.approx(15 / 60)
    assert steps(rollout, 600)[3].share == 1.0


def test_the_step_at_which_it_ended_is_marked_and_later_ones_never_run() -> None:
    rollout = a_rollout(step_index=0, state="expired", ended_at=NOW)
    stay(rollout, 0, "shadow", left_at=NOW, outcome="expire", why="no data")
    assert [step.phase for step in steps(rollout)[1:]] == ["ended", "skipped", "skipped"]


def test_a_share_is_that_of_whatever_takes_longest() -> None:
    plan = {"judged": ["[]", '[["lang","hi"]]'], "pooled": {}, "not_covered": []}
    rollout = a_rollout(step_index=0, state="progressing", plan=plan)
    stay(rollout, 0, "shadow", counts={"[]": 18, '[["lang","hi"]]': 5})
    shadow = steps(rollout)[1]
    assert (shadow.reached, shadow.least, shadow.share) == (5, "lang=hi", 0.25)
    stay(rollout, -1, "prepare", left_at=NOW, outcome="ready")
    assert steps(rollout)[0].share == 1.0
    lasting = [{**DOCUMENT["steps"][0], "for_s": 100}, *DOCUMENT["steps"][1:]]
    Rollout.objects.update(document={**DOCUMENT, "steps": lasting})
    assert steps(rollout, 10)[1].share == pytest.approx(0.1)
    assert steps(rollout, 90)[1].share == 0.25


@pytest.mark.parametrize(
    ("forecast", "traffic", "expected"),
    [
        ([], [], Expected()),
        ([], DECLARED, Expected(20 / 200, slowest="20 observations on lang=hi")),
        ([3.5], DECLARED, Expected(3.5, slowest="failure_rate on all traffic")),
        ([3.5, None], [], Expected(never="failure_rate on all traffic")),
    ],
)
def test_what_is_expected_is_the_slowest_of_floors_and_gates(
    forecast: list[float | None], traffic: list[Any], expected: Expected
) -> None:
    rows = [
        {"step": 0, "metric": "failure_rate", "segment": "[]", "hours": hours} for hours in forecast
    ]
    rollout = a_rollout(forecast=rows)
    Rollout.objects.update(document={**DOCUMENT, "traffic": traffic})
    assert steps(rollout)[1].expected == expected


def test_a_time_alone_is_the_least_where_the_traffic_is_not_known() -> None:
    rollout = a_rollout()
    lasting = [{**DOCUMENT["steps"][1], "for_s": 3600}, *DOCUMENT["steps"][2:]]
    Rollout.objects.update(document={**DOCUMENT, "steps": lasting})
    canary, bake = steps(rollout)[1:]
    assert canary.expected == Expected(1.0, is_least=True)
    assert step_line(canary, NOW).expected == "at least 60 min"
    assert bake.expected == Expected(60 / 3600)


def test_one_sentence_says_what_it_waits_for_and_how_it_ended(queue: Queue) -> None:
    world = World(queue)
    rollout = world.start()
    assert tell_why(rollout) == "Slots load and warm the candidate."
    assert tell_why(world.tick()).startswith("No slot holds it yet")
    ended = services.abort(**world.by(), reason="the wrong build")
    aborted = timeline_of(ended)[0].sequence
    assert aborted is not None
    annotate(rollout=ended, sequence=aborted, reason="sorry", actor="bob", now=NOW)
    assert tell_why(ended) == "The wrong build."
    assert timeline_of(ended)[0].reason == "sorry"
    quietly = services.rollback(**world.by() | {"key": world.start().key})
    assert tell_why(quietly) == "It was rolled back by bob."
    moved = timeline_of(quietly)[0].sequence
    assert moved is not None
    annotate(rollout=quietly, sequence=moved, reason="trains only", actor="eve", now=NOW)
    assert tell_why(quietly) == "Trains only."
    with pytest.raises(UnknownEvent, match="has no event 9999"):
        annotate(rollout=ended, sequence=9999, reason="x", actor="bob", now=NOW)


def test_pairs_that_speak_most_against_the_candidate_come_first(queue: Queue) -> None:
    world = World(queue)
    rollout = world.start()
    flags: dict[str, Any] = {"candidate_flags": ["loop"]}
    world.pairs(1, incumbent_flags=["loop"])
    world.pairs(1, incumbent_flags=["empty"], **flags)
    world.pairs(1, similarity=0.9, **flags)
    world.pairs(1, similarity=0.2, **flags)
    world.pairs(1, score=-0.5, **flags)
    world.pairs(1, failing=1.0)
    world.pairs(1, arm="self", **flags)
    world.pairs(1)
    found = worst_pairs_of(rollout)
    told = [(pair.state, pair.incumbent_flags, pair.score, pair.similarity) for pair in found]
    assert told == [
        ("failed", [], None, None), ("compared", [], -0.5, None), ("compared", [], None, 0.2),
        ("compared", [], None, 0.9), ("compared", ["empty"], None, None), ("compared", ["loop"], None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4, "4 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (86_400, "24 h"), (604_800, "7 days")],
)  # fmt: skip
def test_times_have_one_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_numbers_are_in_the_unit_of_their_metric() -> None:
    plain: dict[str, Any] = {
        "metric": "m", "segment": {}, "name": "all traffic", "verdict": "PASS", "n": 1600, "estimate": 0.012,
        "lower": -0.001, "upper": 0.025, "tolerance": 0.02, "margin": 0.05, "e_harm": 0.5, "e_safe": 2.3e7,
        "needed": 4327, "sentence": "", "is_critical": True, "coverage": 1.0,
    }  # fmt: skip
    flags = gate_line(GateRow(kind="flags", incumbent=0.01, candidate=0.022, **plain))
    assert (flags.estimate, flags.interval, flags.means) == ("+1.2", "-0.1 to +2.5", "1.0% → 2.2%")
    assert (flags.e_harm, flags.e_safe, flags.n, flags.needed) == (
        "0.50",
        "2e7",
        "1,600",
        "4,327 more",
    )
    latency = gate_line(GateRow(kind="latency", incumbent=1200.0, candidate=950.4, **plain))
    assert (latency.estimate, latency.means) == ("1.20 %", "1,200 ms → 950 ms")
