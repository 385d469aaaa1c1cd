"""The table of states: every pair, where it can lead, and where it cannot."""

from __future__ import annotations

import itertools

import pytest

from controlplane.rollouts.machine import (
    ACTIVE,
    EXITS,
    FINAL,
    INCUMBENT_SIDE,
    TRANSITIONS,
    IllegalTransition,
    State,
    Trigger,
    next_state,
    triggers_of,
)

S, T = State, Trigger
# Every legal pair but the exits, written down once more by hand.
LEGAL = {
    (S.PREPARING, T.READY): S.PROGRESSING,
    (S.PROGRESSING, T.ADVANCE): S.PROGRESSING,
    (S.PROGRESSING, T.WEIGH): S.PROGRESSING,
    (S.PAUSED, T.WEIGH): S.PAUSED,
    (S.AWAITING_APPROVAL, T.WEIGH): S.AWAITING_APPROVAL,
    (S.PROGRESSING, T.PAUSE): S.PAUSED,
    (S.PAUSED, T.RESUME): S.PROGRESSING,
    (S.PROGRESSING, T.ASK): S.AWAITING_APPROVAL,
    (S.AWAITING_APPROVAL, T.APPROVE): S.PROGRESSING,
    (S.PROGRESSING, T.COMPLETE): S.COMPLETED,
    (S.PROGRESSING, T.PASS): S.BAKING,
    (S.PAUSED, T.PASS): S.BAKING,
    (S.PROGRESSING, T.FORCE): S.BAKING,
    (S.PAUSED, T.FORCE): S.BAKING,
    (S.AWAITING_APPROVAL, T.FORCE): S.BAKING,
    (S.BAKING, T.BAKED): S.PROMOTED,
    (S.PROMOTED, T.ROLL_BACK): S.ROLLED_BACK,
}


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(State, Trigger)))
def test_every_pair_leads_where_it_should_or_is_refused(state: State, trigger: Trigger) -> None:
    expected = LEGAL.get((state, trigger))
    if state in ACTIVE and trigger in EXITS:
        expected = EXITS[trigger]
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"is {state} knows no {trigger}"):
            next_state(state, trigger)
    else:
        assert next_state(state, trigger) is expected


def test_from_every_active_state_the_exits_lead_to_the_incumbent() -> None:
    for state in ACTIVE:
        assert {T.ABORT, T.ROLL_BACK, T.FAIL, T.HARM, T.EXPIRE} <= triggers_of(state)
        for trigger in (T.ABORT, T.ROLL_BACK, T.FAIL, T.HARM, T.EXPIRE):
            assert next_state(state, trigger) in INCUMBENT_SIDE


def test_nothing_leaves_an_end_but_the_rollback_of_a_promotion() -> None:
    leaving = {(before, trigger) for before, trigger in TRANSITIONS if before in FINAL}
    assert leaving == {(S.PROMOTED, T.ROLL_BACK)}


def test_without_a_pass_or_a_force_nothing_is_promoted() -> None:
    def reach(without: set[Trigger]) -> set[State]:
        seen, ahead = set(), {S.PREPARING}
        while ahead:
            state = ahead.pop()
            seen.add(state)
            ahead |= {
                after
                for (before, trigger), after in TRANSITIONS.items()
                if before is state and trigger not in without and after not in seen
            }
        return seen

    assert S.PROMOTED in reach(set())
    assert {S.BAKING, S.PROMOTED}.isdisjoint(reach({T.PASS, T.FORCE}))


def test_what_runs_in_circles_is_bounded_by_steps_or_needs_a_person() -> None:
    """ADVANCE rises along the steps, a step is released once; everything else leads on, so every path ends."""
    by_people = {T.WEIGH, T.PAUSE, T.RESUME, T.APPROVE, T.ASK}
    onward = {
        (before, after)
        for (before, trigger), after in TRANSITIONS.items()
        if trigger not in by_people | {T.ADVANCE}
    }
    order = {S.PREPARING: 0, S.PROGRESSING: 1, S.PAUSED: 1, S.AWAITING_APPROVAL: 1, S.BAKING: 2}
    for before, after in onward:
        rank = 4 if after is S.ROLLED_BACK else order.get(after, 3)
        assert rank > order.get(before, 3)
