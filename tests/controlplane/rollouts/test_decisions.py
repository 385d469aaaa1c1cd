"""What a rollout does next: what leads to the incumbent first, and no step without its evidence."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.endpoints.candidacy import Traffic
from controlplane.rollouts.decisions import Facts, Move, View, Wait, decide, traffic_at
from controlplane.rollouts.gates import Decision
from controlplane.rollouts.machine import FINAL, State, Trigger, next_state
from controlplane.rollouts.policy import parse_policy
from tests.factories import NOW

DAY_S = 86_400
STEPS: list[dict[str, Any]] = [
    {"type": "score", "share": 0.1, "until": "floor"},
    {"type": "shadow", "share": 0.2, "self_share": 0.01},
    {"type": "pause", "for_s": 60},
    {"type": "canary", "bp": 100, "until": "floor", "for_s": 300, "share": 0.05},
    {"type": "approval"},
    {"type": "pause"},
    {"type": "canary", "bp": 2000},
    {"type": "bake", "for_s": 600},
]
POLICY = parse_policy({"steps": STEPS, "prepare_s": 900})
LAST, BAKE = 6, 7


def view(state: State = State.PROGRESSING, index: int = 0, **fields: Any) -> View:
    values: dict[str, Any] = {
        "state": state,
        "step_index": index,
        "step_at": NOW,
        "deadline_at": NOW + timedelta(days=14),
        "is_released": False,
        "hold": "",
        "policy": POLICY,
    }
    return View(**values | fields)


def facts(after_s: float = 0.0, **fields: Any) -> Facts:
    values: dict[str, Any] = {"is_held": True, "is_ready": True, "reason": "told"}
    return Facts(now=NOW + timedelta(seconds=after_s), **values | fields)


def trigger_of(choice: Move | Wait) -> Trigger | None:
    return choice.trigger if isinstance(choice, Move) else None


@pytest.mark.parametrize(
    ("known", "trigger"),
    [
        (facts(is_held=False, broken="x", decision=Decision.ROLLBACK), Trigger.SUPERSEDE),
        (facts(broken="could not be loaded", decision=Decision.ROLLBACK), Trigger.FAIL),
        (facts(decision=Decision.ROLLBACK), Trigger.HARM),
    ],
)
@pytest.mark.parametrize(
    "state", [State.PROGRESSING, State.PAUSED, State.AWAITING_APPROVAL, State.BAKING]
)
def test_what_leads_to_the_incumbent_comes_first_whatever_the_state(
    state: State, known: Facts, trigger: Trigger
) -> None:
    assert trigger_of(decide(view(state), known)) is trigger


def test_a_candidate_is_waited_for_until_it_is_ready_or_too_late() -> None:
    preparing = view(State.PREPARING, -1)
    assert isinstance(decide(preparing, facts(899, is_ready=False)), Wait)
    late = decide(preparing, facts(900, is_ready=False, missing="no slot holds it"))
    assert late == Move(Trigger.FAIL, "the candidate was not ready within 900 s: no slot holds it")
    ready = decide(preparing, facts())
    assert isinstance(ready, Move)
    assert (ready.trigger, ready.step_index, ready.traffic) == (
        Trigger.READY, 0, Traffic(score_bp=1000),
    )  # fmt: skip


def test_a_step_that_gathers_evidence_goes_on_with_its_floor_and_its_gates() -> None:
    scoring, shadow = view(index=0), view(index=1)
    assert decide(scoring, facts(short_of="12 of 50")) == Wait("12 of 50")
    assert trigger_of(decide(scoring, facts(undecided="not passed"))) is Trigger.ADVANCE
    assert decide(shadow, facts(undecided="not passed")) == Wait("not passed")
    assert trigger_of(decide(shadow, facts())) is Trigger.ADVANCE


def test_a_canary_lasts_as_long_as_it_is_to_and_gives_what_it_says() -> None:
    canary = view(index=3)
    assert decide(canary, facts(299)) == Wait("the step lasts 300 s at least")
    assert trigger_of(decide(canary, facts(300))) is Trigger.ADVANCE
    assert traffic_at(POLICY, 3) == Traffic(canary_bp=100, shadow_bp=500)
    assert traffic_at(POLICY, 4) == traffic_at(POLICY, 5) == traffic_at(POLICY, 3)
    assert traffic_at(POLICY, 2) == Traffic(shadow_bp=2000, self_bp=100)


def test_a_pause_waits_for_its_time_or_for_somebody() -> None:
    assert decide(view(index=2), facts()) == Move(Trigger.PAUSE, "pause for 60 s", hold="step")
    paused = view(State.PAUSED, 2, hold="step")
    assert isinstance(decide(paused, facts(59)), Wait)
    over = decide(paused, facts(60))
    assert isinstance(over, Move)
    assert (over.trigger, over.is_released) == (Trigger.RESUME, True)
    assert trigger_of(decide(view(index=2, is_released=True), facts(60))) is Trigger.ADVANCE
    without_end = view(State.PAUSED, 5, hold="step")
    assert isinstance(decide(without_end, facts(6 * DAY_S)), Wait)
    by_hand = view(State.PAUSED, 2, hold="manual")
    assert isinstance(decide(by_hand, facts(3600)), Wait)


def test_an_approval_is_asked_for_once_and_waited_for() -> None:
    assert trigger_of(decide(view(index=4), facts())) is Trigger.ASK
    assert isinstance(decide(view(State.AWAITING_APPROVAL, 4), facts()), Wait)
    assert trigger_of(decide(view(index=4, is_released=True), facts())) is Trigger.ADVANCE


def test_a_deadline_leads_to_the_incumbent_also_while_paused_and_names_what_was_missing() -> None:
    week_s = 7 * DAY_S
    for state in (State.PROGRESSING, State.PAUSED, State.AWAITING_APPROVAL):
        assert isinstance(decide(view(state, 1), facts(week_s - 1, undecided="no pass")), Wait)
        late = decide(view(state, 1), facts(week_s, undecided="no pass"))
        assert late == Move(Trigger.EXPIRE, "the deadline of step 2 passed: no pass")
    over = decide(view(State.PREPARING, -1, deadline_at=NOW), facts(is_ready=False))
    assert trigger_of(over) is Trigger.EXPIRE


def test_the_time_of_the_whole_rollout_ends_it_however_young_its_step_is() -> None:
    for state in (State.PROGRESSING, State.PAUSED, State.AWAITING_APPROVAL):
        over = decide(view(state, 1, deadline_at=NOW + timedelta(hours=1)), facts(3600))
        assert trigger_of(over) is Trigger.EXPIRE


def test_the_last_step_leads_to_a_promotion_by_a_pass_alone() -> None:
    last = view(index=LAST)
    promoting = decide(last, facts(700, decision=Decision.PROMOTE))
    assert promoting == Move(Trigger.PASS, "told", step_index=BAKE)
    undecided = decide(last, facts(700, reason="12 segments are undecided"))
    assert undecided == Wait("no promotion without a pass: 12 segments are undecided")
    assert isinstance(decide(last, facts(700, decision=Decision.PROMOTE, is_ready=False)), Wait)


def test_a_policy_that_does_not_promote_ends_with_its_last_step() -> None:
    policy = parse_policy({"steps": STEPS[:2]})
    done = decide(view(index=1, policy=policy), facts(decision=Decision.PROMOTE))
    assert trigger_of(done) is Trigger.COMPLETE


def test_a_failed_gate_that_is_not_critical_holds_the_rollout() -> None:
    held = decide(view(index=1), facts(failing=("cost on all traffic",)))
    assert isinstance(held, Move)
    assert (held.trigger, held.hold) == (Trigger.PAUSE, "gate")
    assert "cost on all traffic" in held.reason


def test_a_bake_ends_with_its_time_or_with_what_was_found() -> None:
    baking = view(State.BAKING, BAKE)
    assert isinstance(decide(baking, facts(599)), Wait)
    assert trigger_of(decide(baking, facts(600))) is Trigger.BAKED
    found = decide(baking, facts(600, baking="half of the requests failed"))
    assert found == Move(Trigger.HARM, "half of the requests failed")
    without = view(State.BAKING, 2, policy=parse_policy({"steps": STEPS[:2]}))
    assert trigger_of(decide(without, facts())) is Trigger.BAKED


choices = st.builds(
    Facts,
    now=st.integers(0, 20 * DAY_S).map(lambda s: NOW + timedelta(seconds=s)),
    is_held=st.booleans(),
    is_ready=st.booleans(),
    broken=st.sampled_from(["", "broken"]),
    decision=st.sampled_from(Decision),
    reason=st.just("told"),
    failing=st.sampled_from([(), ("cost",)]),
    short_of=st.sampled_from(["", "short"]),
    undecided=st.sampled_from(["", "undecided"]),
    baking=st.sampled_from(["", "bad"]),
)
views = st.builds(
    view,
    st.sampled_from(
        [State.PREPARING, State.PROGRESSING, State.PAUSED, State.AWAITING_APPROVAL, State.BAKING]
    ),
    st.integers(0, 7),
    is_released=st.booleans(),
    hold=st.sampled_from(["", "step", "gate", "manual"]),
)


@given(views, choices)
def test_every_choice_is_legal_and_none_promotes_without_a_pass(
    rollout: View, known: Facts
) -> None:
    choice = decide(rollout, known)
    if isinstance(choice, Wait):
        assert choice.reason
        return
    assert next_state(rollout.state, choice.trigger) is not None
    if next_state(rollout.state, choice.trigger) is State.BAKING:
        assert (known.decision, known.is_ready, known.broken) == (Decision.PROMOTE, True, "")
    if choice.traffic is not None:
        assert choice.traffic.canary_bp <= 2000


@given(views, choices)
def test_however_it_stands_a_rollout_has_ended_when_its_time_is_over(
    rollout: View, known: Facts
) -> None:
    late = replace(known, now=max(known.now, rollout.deadline_at))
    choice = decide(rollout, late)
    assert isinstance(choice, Move)
    assert next_state(rollout.state, choice.trigger) in FINAL
