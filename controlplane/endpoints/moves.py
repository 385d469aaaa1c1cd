"""What may change where an endpoint leads: state in, next state out, or the reason why not.

A move that would change nothing returns the state it was given. Every other one raises the generation by one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

from controlplane.endpoints.routing import ROLES, EndpointState, Placed
from controlplane.errors import DomainError


class MoveRefused(DomainError):
    """The move does not fit the state of the endpoint, which ``details`` tell."""

    code = "move_refused"
    status = HTTPStatus.CONFLICT

    def __init__(self, message: str, state: EndpointState, **details: Any) -> None:
        super().__init__(message, details={"current": summarize(state), **details})


class StaleGeneration(MoveRefused):
    """The endpoint has changed since the caller looked at it."""

    code = "stale_generation"


class VersionNotResident(MoveRefused):
    """No slot holds the version ready."""

    code = "version_not_resident"
    permanent = False


class NothingToRollBackTo(MoveRefused):
    """No version is kept to go back to."""

    code = "nothing_to_roll_back_to"


class PreviousNotReady(MoveRefused):
    """The version to go back to could not answer, while the live one can."""

    code = "previous_not_ready"
    permanent = False


class CandidateIsLive(MoveRefused):
    """The live version cannot be its own candidate."""

    code = "candidate_is_live"


class NoCandidate(MoveRefused):
    """A share of the traffic needs a candidate to go to."""

    code = "no_candidate"


class HeldByRollout(MoveRefused):
    """A rollout decides about the candidate and its share."""

    code = "held_by_rollout"


# What a candidate is given, of 10,000 requests each: to answer, to answer unseen, to score; and what is answered twice.
SHARES = ("canary_bp", "shadow_bp", "self_bp", "score_bp")


@dataclass(frozen=True, slots=True)
class Settings:
    """What people may set on an endpoint beside its route; None leaves a setting as it is."""

    queue_cap: int | None = None
    deadline_s: float | None = None
    store_texts: bool | None = None
    in_flight: str | None = None
    standby_s: int | None = None

    def changes(self) -> dict[str, Any]:
        """The settings that were given."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value is not None}


def summarize(state: EndpointState) -> dict[str, Any]:
    """The route as answers and events tell it."""
    named = {role: placed.name for role, placed in state.placed().items()}
    roles = {role: named.get(role) for role in ROLES}
    summary = {"generation": state.generation, **roles, "canary_bp": state.canary_bp}
    if not state.rollout:
        return summary
    return summary | {name: getattr(state, name) for name in SHARES} | {"rollout": state.rollout}


def check_generation(state: EndpointState, expected: int | None) -> None:
    """Refuse a change by somebody who has seen another state.

    Raises:
        StaleGeneration: ``expected`` is given and is not the generation of ``state``.
    """
    if expected is not None and expected != state.generation:
        raise StaleGeneration(
            f"Endpoint {state.name!r} is at generation {state.generation}, not {expected}: somebody changed it. "
            "Look at it again and decide anew.",
            state,
        )


def promote(
    state: EndpointState, target: Placed, *, is_ready: bool, missing: str, now: datetime
) -> EndpointState:
    """Send the requests of the endpoint to ``target``; the version that was live becomes the way back.

    ``missing`` says what a slot lacks when ``is_ready`` is false. Naming a rejected version here is what takes the
    rejection from it.

    Raises:
        VersionNotResident: no slot could answer with it.
    """
    if target.name == state.live.name:
        return state
    if not is_ready:
        raise VersionNotResident(
            f"{target.name} cannot go live on endpoint {state.name!r}: {missing}.",
            state,
            missing=missing,
        )
    moved = _leave_roles(end_rollout(state), target)
    displaced = moved.previous
    moved = replace(
        moved,
        live=target,
        previous=state.live,
        rejected=state.rejected - {target.name},
        ending="finish",
    )
    # What was rolled back keeps its standby; only an empty place is filled with what gave way here.
    if displaced is not None and moved.retired is None:
        moved = retire(moved, displaced, now)
    return next_generation(moved)


def rollback(
    state: EndpointState,
    *,
    leave: str,
    target: Placed | None,
    ready: Collection[str] | None,
    force: bool,
    now: datetime,
    names_nothing: bool = False,
) -> EndpointState:
    """Take the version ``leave`` back: ``target``, or else the previous version, is live at once.

    The version left is rejected and retired, and ``previous`` is empty, so that nothing leads back to it by itself.
    If ``leave`` is not live, somebody was faster and nothing changes; nor does it where a call that ``names_nothing``
    comes after a rollback, because then it is a repeat. ``ready`` are the versions that can answer,
    or None when nobody knows, which does not hold a rollback up.

    Raises:
        NothingToRollBackTo: nothing was named, and no version is kept that was not rejected.
        PreviousNotReady: the target could not answer, but the live version can; ``force`` goes there anyway.
    """
    # Only a rollback leaves a rejected version and no previous one.
    is_repeat = names_nothing and state.previous is None and bool(state.rejected)
    if state.live.name != leave or is_repeat:
        return state
    to = target or state.previous
    if to is None or to.name == leave or (target is None and to.name in state.rejected):
        raise NothingToRollBackTo(
            f"Endpoint {state.name!r} keeps no version to go back to from {leave}; name one with `to`.",
            state,
        )
    if not force and ready is not None and to.name not in ready and leave in ready:
        raise PreviousNotReady(
            f"No slot holds {to.name} ready for endpoint {state.name!r}, while {leave} answers. Wait, or send "
            "`force: true` to go there all the same.",
            state,
        )
    rejected = (state.rejected | {leave}) - {to.name}
    moved = replace(
        _leave_roles(end_rollout(state), to),
        live=to,
        previous=None,
        rejected=rejected,
        ending=state.in_flight,
    )
    return next_generation(retire(moved, state.live, now))


def set_candidate(
    state: EndpointState, candidate: Placed | None, *, canary_bp: int | None = None, salt: str
) -> EndpointState:
    """Let slots load ``candidate``, or no candidate at all, and give it ``canary_bp`` of 10,000 requests.

    Another candidate begins without traffic unless a share is given, and with ``salt``, so that it is not the same
    users who meet every candidate first.

    Raises:
        CandidateIsLive: it answers already.
        NoCandidate: a share was given, and nobody to take it.
        HeldByRollout: a rollout decides about the candidate.
    """
    if candidate is not None and candidate.name == state.live.name:
        raise CandidateIsLive(
            f"{candidate.name} is live on endpoint {state.name!r}; it needs no candidacy.", state
        )
    is_same = candidate == state.candidate
    share = (state.canary_bp if is_same else 0) if canary_bp is None else canary_bp
    if share and candidate is None:
        raise NoCandidate(
            f"Endpoint {state.name!r} has no candidate that could take {share} basis points; set one first.",
            state,
        )
    if is_same and share == state.canary_bp:
        return state
    if state.rollout:
        raise HeldByRollout(
            f"Rollout {state.rollout} decides about the candidate of endpoint {state.name!r}; use its actions, or abort "
            "it first.",
            state,
        )
    moved = replace(place_candidate(state, candidate), canary_bp=share, ending="finish")
    return next_generation(moved if is_same else replace(moved, salt=salt))


def place_candidate(state: EndpointState, candidate: Placed | None) -> EndpointState:
    """``state`` with that candidate, which is no longer kept as a retired version."""
    moved = replace(state, candidate=candidate)
    if candidate is not None and state.retired is not None and candidate.name == state.retired.name:
        moved = replace(moved, retired=None, retired_until=None)
    return moved


def end_rollout(state: EndpointState) -> EndpointState:
    """``state`` without the rollout that holds its candidate, and without the candidate."""
    if not state.rollout:
        return state
    none: dict[str, Any] = dict.fromkeys(SHARES, 0)
    return replace(state, candidate=None, rollout="", **none)


def configure(state: EndpointState, settings: Settings) -> EndpointState:
    """Set what is given; the values were checked at the edge."""
    moved = replace(state, **settings.changes())
    return state if moved == state else next_generation(moved)


def end_standby(state: EndpointState, now: datetime) -> EndpointState:
    """Let a retired version go whose time is over."""
    if state.retired_until is None or state.retired_until > now:
        return state
    return next_generation(replace(state, retired=None, retired_until=None))


def in_one(before: EndpointState, after: EndpointState) -> EndpointState:
    """Several moves from ``before`` to ``after`` as one change, with one generation."""
    return before if after == before else replace(after, generation=before.generation + 1)


def _leave_roles(state: EndpointState, target: Placed) -> EndpointState:
    """``state`` without ``target`` in the roles that it leaves for a better one."""
    if state.candidate is not None and state.candidate.name == target.name:
        state = replace(state, candidate=None, canary_bp=0)
    if state.retired is not None and state.retired.name == target.name:
        state = replace(state, retired=None, retired_until=None)
    if state.previous is not None and state.previous.name == target.name:
        state = replace(state, previous=None)
    return state


def retire(state: EndpointState, placed: Placed, now: datetime) -> EndpointState:
    """``state`` that keeps ``placed`` without a route for the standby time."""
    until = now + timedelta(seconds=state.standby_s)
    return replace(state, retired=placed, retired_until=until)


def next_generation(state: EndpointState) -> EndpointState:
    """``state`` as the next change of its route."""
    return replace(state, generation=state.generation + 1)
