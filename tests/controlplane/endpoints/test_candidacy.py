"""What a rollout may do with its endpoint, and that it does nothing to one that is not its own."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from controlplane.endpoints import candidacy, moves
from controlplane.endpoints.candidacy import Traffic
from controlplane.endpoints.moves import CandidateIsLive, HeldByRollout, VersionNotResident
from controlplane.endpoints.routing import EndpointState
from tests.controlplane.endpoints.test_moves import NOW, V1, V2, V3, V4, make_state

KEY = "r1"
TRAFFIC = Traffic(canary_bp=100, shadow_bp=2000, self_bp=50, score_bp=10)


def held() -> EndpointState:
    """v3 on trial, with traffic."""
    return candidacy.set_traffic(candidacy.hold(make_state(), V3, KEY), KEY, TRAFFIC)


def test_a_hold_gives_no_traffic_and_a_salt_of_its_own() -> None:
    state = candidacy.hold(make_state(retired=V3, retired_until=NOW), V3, KEY)
    assert (state.candidate, state.rollout, state.salt, state.generation) == (V3, KEY, KEY, 8)
    assert (candidacy.traffic_of(state), state.retired) == (Traffic(), None)
    assert candidacy.hold(state, V3, KEY) is state


def test_a_share_by_hand_ends_with_the_hold() -> None:
    assert candidacy.hold(make_state(candidate=V3, canary_bp=500), V3, KEY).canary_bp == 0


def test_what_is_taken_is_not_taken_over() -> None:
    with pytest.raises(HeldByRollout, match="Rollout r1 holds"):
        candidacy.hold(held(), V4, "r2")
    with pytest.raises(HeldByRollout, match="by hand"):
        candidacy.hold(make_state(candidate=V4), V3, KEY)
    with pytest.raises(CandidateIsLive):
        candidacy.hold(make_state(), V2, KEY)


def test_traffic_is_exactly_what_was_given_and_a_repeat_changes_nothing() -> None:
    state = held()
    assert (candidacy.traffic_of(state), state.generation) == (TRAFFIC, 9)
    assert candidacy.set_traffic(state, KEY, TRAFFIC) is state


def test_a_promotion_keeps_the_incumbent_and_the_watch() -> None:
    state = candidacy.promote(held(), KEY, is_ready=True, missing="", now=NOW)
    assert (state.live, state.previous, state.candidate, state.rollout) == (V3, V2, None, KEY)
    assert candidacy.traffic_of(state) == Traffic()
    assert candidacy.let_go(state, KEY).rollout == ""
    with pytest.raises(VersionNotResident):
        candidacy.promote(held(), KEY, is_ready=False, missing="no slot holds it", now=NOW)


def test_taking_back_before_a_promotion_takes_the_traffic_and_keeps_a_rejected_one_for_a_look() -> (
    None
):
    state = candidacy.take_back(
        held(), KEY, V3.name, ready=frozenset(), in_flight="cut", is_rejected=True, now=NOW
    )
    assert (state.live, state.previous, state.candidate, state.rollout) == (V2, V1, None, "")
    assert (candidacy.traffic_of(state), state.ending, state.rejected) == (
        Traffic(), "cut", frozenset({V3.name}),
    )  # fmt: skip
    assert (state.retired, state.retired_until) == (V3, NOW + timedelta(seconds=state.standby_s))


def test_how_long_it_stays_is_the_policys_word_if_it_has_one() -> None:
    for state in (held(), candidacy.promote(held(), KEY, is_ready=True, missing="", now=NOW)):
        back = candidacy.take_back(
            state, KEY, V3.name, ready=None, in_flight="cut", is_rejected=True, now=NOW, standby_s=7
        )
        assert (back.retired, back.retired_until) == (V3, NOW + timedelta(seconds=7))
        assert back.standby_s == state.standby_s


def test_one_that_is_not_rejected_is_let_go_and_may_come_again() -> None:
    state = candidacy.take_back(
        held(), KEY, V3.name, ready=None, in_flight="finish", is_rejected=False, now=NOW
    )
    assert (state.retired, state.rejected, state.ending) == (None, frozenset(), "finish")


@pytest.mark.parametrize("is_rejected", [True, False])
def test_taking_back_what_is_live_makes_the_incumbent_live_again(is_rejected: bool) -> None:
    live = candidacy.promote(held(), KEY, is_ready=True, missing="", now=NOW)
    state = candidacy.take_back(
        live, KEY, V3.name, ready=None, in_flight="cut", is_rejected=is_rejected, now=NOW
    )
    assert (state.live, state.previous, state.rollout) == (V2, None, "")
    assert state.rejected == ({V3.name} if is_rejected else frozenset())
    assert (state.ending, state.in_flight, state.generation) == (
        "cut",
        "finish",
        live.generation + 1,
    )


def test_a_rollout_does_nothing_to_an_endpoint_that_is_not_its_own() -> None:
    state = held()
    assert candidacy.set_traffic(state, "r2", Traffic(canary_bp=9)) is state
    assert candidacy.promote(state, "r2", is_ready=True, missing="", now=NOW) is state
    assert candidacy.let_go(state, "r2") is state
    back = candidacy.take_back(
        state, "r2", V3.name, ready=None, in_flight="cut", is_rejected=True, now=NOW
    )
    assert back is state


def test_a_move_by_hand_ends_the_hold_and_settings_do_not() -> None:
    state = held()
    promoted = moves.promote(state, V4, is_ready=True, missing="", now=NOW)
    back = moves.rollback(
        state, leave=V2.name, target=None, ready=None, force=False, now=NOW, names_nothing=True
    )
    for moved in (promoted, back):
        assert (moved.candidate, moved.rollout, candidacy.traffic_of(moved)) == (
            None,
            "",
            Traffic(),
        )
    settings = moves.configure(state, moves.Settings(queue_cap=9))
    assert replace(settings, queue_cap=7, generation=state.generation) == state
    for candidate, share in ((None, None), (V4, 5), (V3, 5)):
        with pytest.raises(HeldByRollout, match="use its actions, or abort it first"):
            moves.set_candidate(state, candidate, canary_bp=share, salt="t")
