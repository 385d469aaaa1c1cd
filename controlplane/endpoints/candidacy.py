"""What a rollout may do with its endpoint: state in, next state out. Each move is the rollout's own, or does nothing.

A promote or a rollback by hand ends the hold of a rollout (``moves``), so that a rollout that comes late finds another
id, or none, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from controlplane.endpoints import moves
from controlplane.endpoints.moves import (
    SHARES,
    CandidateIsLive,
    HeldByRollout,
    end_rollout,
    next_generation,
    place_candidate,
    retire,
)
from controlplane.endpoints.routing import EndpointState, Placed


@dataclass(frozen=True, slots=True)
class Traffic:
    """Shares of 10,000 requests: answered by the candidate, copied to it, answered twice by the live version, scored."""

    canary_bp: int = 0
    shadow_bp: int = 0
    self_bp: int = 0
    score_bp: int = 0


def traffic_of(state: EndpointState) -> Traffic:
    """What the candidate is given now."""
    return Traffic(**{name: getattr(state, name) for name in SHARES})


def hold(state: EndpointState, candidate: Placed, rollout: str) -> EndpointState:
    """Let slots load ``candidate`` for ``rollout``, without traffic, and with the rollout as the salt of its buckets.

    Raises:
        HeldByRollout: another rollout, or somebody by hand, has a candidate there.
        CandidateIsLive: it answers already.
    """
    if state.rollout == rollout:
        return state
    if state.rollout:
        raise HeldByRollout(
            f"Rollout {state.rollout} holds endpoint {state.name!r}; end it first.", state
        )
    if candidate.name == state.live.name:
        raise CandidateIsLive(
            f"{candidate.name} is live on endpoint {state.name!r}; there is nothing to roll out.",
            state,
        )
    if state.candidate is not None and state.candidate.name != candidate.name:
        raise HeldByRollout(
            f"{state.candidate.name} is the candidate of endpoint {state.name!r} by hand; let it go first.",
            state,
        )
    moved = place_candidate(state, candidate)
    return next_generation(
        replace(moved, rollout=rollout, salt=rollout, ending="finish", canary_bp=0)
    )


def set_traffic(state: EndpointState, rollout: str, traffic: Traffic) -> EndpointState:
    """Give the candidate of ``rollout`` exactly this traffic."""
    if state.rollout != rollout or state.candidate is None or traffic_of(state) == traffic:
        return state
    return next_generation(replace(state, **asdict(traffic)))


def promote(
    state: EndpointState, rollout: str, *, is_ready: bool, missing: str, now: datetime
) -> EndpointState:
    """Make the candidate of ``rollout`` live; the rollout goes on watching it.

    Raises:
        VersionNotResident: no slot could answer with it.
    """
    if state.rollout != rollout or state.candidate is None:
        return state
    moved = moves.promote(state, state.candidate, is_ready=is_ready, missing=missing, now=now)
    return replace(moved, rollout=rollout)


def take_back(
    state: EndpointState,
    rollout: str,
    candidate: str,
    *,
    ready: Collection[str] | None,
    in_flight: str,
    is_rejected: bool,
    now: datetime,
    standby_s: int | None = None,
) -> EndpointState:
    """End ``rollout`` on the incumbent's side: its candidate has no traffic, and is not live.

    A candidate that ``is_rejected`` stays for ``standby_s`` (or as long as the endpoint says) to be looked at, and is used
    again only when somebody names it. ``in_flight`` says how the requests end that it has in its hands.

    Raises:
        PreviousNotReady: the candidate is live, and nobody else could answer.
        NothingToRollBackTo: the candidate is live, and no version is kept to go back to.
    """
    if state.rollout != rollout:
        return state
    ordered = replace(state, in_flight=in_flight, standby_s=standby_s or state.standby_s)
    if state.live.name == candidate:
        moved = moves.rollback(
            ordered, leave=candidate, target=None, ready=ready, force=False, now=now
        )
        rejected = moved.rejected if is_rejected else moved.rejected - {candidate}
    else:
        moved = next_generation(replace(end_rollout(ordered), ending=in_flight))
        rejected = state.rejected
        if is_rejected and state.candidate is not None:
            moved = retire(moved, state.candidate, now)
            rejected = state.rejected | {candidate}
    return replace(moved, in_flight=state.in_flight, standby_s=state.standby_s, rejected=rejected)


def let_go(state: EndpointState, rollout: str) -> EndpointState:
    """End the hold of ``rollout`` on an endpoint whose live version it has become."""
    if state.rollout != rollout:
        return state
    return next_generation(end_rollout(state))
