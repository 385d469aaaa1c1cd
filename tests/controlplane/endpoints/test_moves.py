"""What may change where an endpoint leads, and what no order of moves can bring about."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.endpoints import moves
from controlplane.endpoints.moves import MoveRefused, Settings
from controlplane.endpoints.routing import EndpointState, Placed, residents_of

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
V1, V2, V3, V4 = (Placed(f"tiny/{n}", f"/artifacts/{n}") for n in range(1, 5))
VERSIONS = (V1, V2, V3, V4)


def make_state(**fields: Any) -> EndpointState:
    """v2 live, v1 the way back."""
    values: dict[str, Any] = {
        "name": "chat",
        "incarnation": "i",
        "generation": 7,
        "salt": "s",
        "live": V2,
        "previous": V1,
        "candidate": None,
        "canary_bp": 0,
        "queue_cap": 7,
        "deadline_s": 30.0,
        "store_texts": False,
    }
    return EndpointState(**values | fields)


def promote(state: EndpointState, target: Placed, *, is_ready: bool = True) -> EndpointState:
    return moves.promote(state, target, is_ready=is_ready, missing="no slot holds it", now=NOW)


def rollback(
    state: EndpointState,
    leave: str = "",
    to: Placed | None = None,
    *,
    ready: frozenset[str] | None = frozenset({"tiny/1", "tiny/2"}),
    force: bool = False,
) -> EndpointState:
    return moves.rollback(
        state,
        leave=leave or state.live.name,
        target=to,
        ready=ready,
        force=force,
        now=NOW,
        names_nothing=not (leave or to),
    )


def test_a_promoted_candidate_goes_live_and_the_old_version_is_the_way_back() -> None:
    after = promote(make_state(previous=None, candidate=V3, canary_bp=500), V3)
    assert (after.live, after.previous, after.candidate, after.canary_bp) == (V3, V2, None, 0)
    assert after.generation == 8


def test_another_candidate_stays_when_something_else_is_promoted() -> None:
    after = promote(make_state(candidate=V3, canary_bp=500), V4)
    assert (after.live, after.candidate, after.canary_bp) == (V4, V3, 500)


def test_a_version_that_no_slot_holds_ready_is_refused_with_what_is_missing() -> None:
    with pytest.raises(moves.VersionNotResident, match=r"tiny/3.*no slot holds it") as caught:
        promote(make_state(), V3, is_ready=False)
    assert caught.value.details["missing"] == "no slot holds it"
    assert caught.value.details["current"]["live"] == "tiny/2"


def test_promoting_the_live_version_changes_nothing_ready_or_not() -> None:
    state = make_state()
    assert promote(state, V2, is_ready=False) is state


def test_the_version_that_a_promote_displaces_stays_for_the_standby() -> None:
    after = promote(make_state(standby_s=60), V3)
    assert (after.retired, after.retired_until) == (V1, NOW + timedelta(seconds=60))
    assert after.rejected == frozenset()


def test_what_was_rolled_back_keeps_its_standby_when_another_version_is_displaced() -> None:
    until = NOW + timedelta(seconds=9)
    after = promote(make_state(retired=V4, retired_until=until), V3)
    assert (after.retired, after.retired_until) == (V4, until)


def test_a_rollback_leaves_nothing_that_leads_back() -> None:
    after = rollback(make_state(standby_s=60))
    assert (after.live, after.previous) == (V1, None)
    assert after.rejected == {"tiny/2"}
    assert (after.retired, after.retired_until) == (V2, NOW + timedelta(seconds=60))
    with pytest.raises(moves.NothingToRollBackTo):
        rollback(after, leave="tiny/1")


def test_a_repeated_rollback_finds_that_somebody_was_faster() -> None:
    after = rollback(make_state())
    assert rollback(after, leave="tiny/2") is after
    assert rollback(after) is after


def test_without_a_way_back_a_first_rollback_is_refused() -> None:
    with pytest.raises(moves.NothingToRollBackTo):
        rollback(make_state(previous=None))


def test_a_rejected_version_serves_again_when_it_is_named() -> None:
    after = rollback(make_state())
    again = promote(after, V2)
    assert (again.live, again.previous, again.retired) == (V2, V1, None)
    assert again.rejected == frozenset()


def test_a_rejected_version_is_never_gone_back_to_by_itself() -> None:
    state = make_state(rejected=frozenset({"tiny/1"}))
    with pytest.raises(moves.NothingToRollBackTo):
        rollback(state)
    assert rollback(state, to=V1).live == V1


def test_the_version_to_go_back_to_can_be_named() -> None:
    after = rollback(make_state(candidate=V3, canary_bp=5), to=V3, ready=frozenset({"tiny/3"}))
    assert (after.live, after.previous, after.candidate, after.canary_bp) == (V3, None, None, 0)


@pytest.mark.parametrize(
    ("ready", "force", "is_refused"),
    [
        ({"tiny/1", "tiny/2"}, False, False),
        ({"tiny/2"}, False, True),
        ({"tiny/2"}, True, False),
        (set(), False, False),
        (None, False, False),
    ],
)
def test_a_target_that_cannot_answer_is_refused_only_while_the_live_one_can(
    ready: set[str] | None, force: bool, is_refused: bool
) -> None:
    known = None if ready is None else frozenset(ready)
    if is_refused:
        with pytest.raises(moves.PreviousNotReady, match="force"):
            rollback(make_state(), ready=known, force=force)
    else:
        assert rollback(make_state(), ready=known, force=force).live == V1


def test_another_candidate_begins_without_traffic_and_with_another_salt() -> None:
    state = make_state(candidate=V3, canary_bp=500)
    after = moves.set_candidate(state, V4, salt="t")
    assert (after.candidate, after.canary_bp, after.salt) == (V4, 0, "t")
    assert moves.set_candidate(state, V3, salt="t") is state


def test_a_share_needs_a_candidate_and_the_live_version_is_none() -> None:
    with pytest.raises(moves.NoCandidate):
        moves.set_candidate(make_state(), None, canary_bp=1, salt="t")
    with pytest.raises(moves.CandidateIsLive):
        moves.set_candidate(make_state(), V2, salt="t")


def test_a_retired_version_may_be_the_candidate_again() -> None:
    state = make_state(retired=V3, retired_until=NOW)
    after = moves.set_candidate(state, V3, salt="t")
    assert (after.candidate, after.retired, after.retired_until) == (V3, None, None)


def test_several_moves_are_one_generation() -> None:
    state = make_state()
    after = moves.configure(moves.set_candidate(state, V3, salt="t"), Settings(queue_cap=9))
    assert after.generation == 9
    assert moves.in_one(state, after).generation == 8


def test_settings_that_are_so_already_change_nothing() -> None:
    state = make_state()
    assert moves.configure(state, Settings(queue_cap=7)) is state


def test_a_standby_ends_when_its_time_is_over_and_the_rejection_stays() -> None:
    state = rollback(make_state(standby_s=60))
    assert moves.end_standby(state, NOW + timedelta(seconds=59)) is state
    ended = moves.end_standby(state, NOW + timedelta(seconds=60))
    assert (ended.retired, ended.retired_until) == (None, None)
    assert ended.rejected == {"tiny/2"}


def test_only_a_rollback_uses_the_policy_for_requests_in_flight() -> None:
    state = make_state(in_flight="cut")
    assert promote(state, V3).ending == "finish"
    back = rollback(state)
    assert back.ending == "cut"
    assert moves.configure(back, Settings(queue_cap=9)).ending == "cut"
    assert promote(back, V3).ending == "finish"


moves_of_people = st.lists(
    st.tuples(
        st.sampled_from(["promote", "rollback", "candidate", "canary", "end"]),
        st.sampled_from(VERSIONS),
        st.booleans(),
    ),
    max_size=20,
)


def move(state: EndpointState, kind: str, version: Placed, flag: bool) -> EndpointState:
    match kind:
        case "promote":
            return promote(state, version, is_ready=flag)
        case "rollback":
            return rollback(state, version.name if flag else "", ready=None)
        case "candidate":
            return moves.set_candidate(state, version if flag else None, salt="t")
        case "canary":
            return moves.set_candidate(state, state.candidate, canary_bp=100 * flag, salt="t")
    return moves.end_standby(state, NOW + timedelta(hours=2))


@given(moves_of_people)
def test_whatever_people_do_an_endpoint_stays_one_that_can_be(
    steps: list[tuple[str, Placed, bool]],
) -> None:
    state = make_state()
    for kind, version, flag in steps:
        try:
            after = move(state, kind, version, flag)
        except MoveRefused:
            continue
        assert (after is state) or after.generation == state.generation + 1
        assert (after is state) == (replace(after, generation=0) == replace(state, generation=0))
        if kind == "rollback" and after is not state:
            assert after.live.name not in state.rejected
        state = after
        others = [state.previous, state.candidate, state.retired]
        assert state.live not in others
        assert state.live.name not in state.rejected
        assert state.candidate is not None or state.canary_bp == 0
        assert (state.retired is None) == (state.retired_until is None)
        residents = [resident.version for resident in residents_of([state])]
        assert len(residents) == len(set(residents))
        assert residents[0] == state.live.name
