"""From the state of an endpoint to what Redis is told: its route, and the versions slots should hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from inference.protocol import Resident, Route

# The order in which versions are wanted: an answer first, then the way back, then what is to come.
ROLES = ("live", "previous", "candidate", "retired")
IN_FLIGHT_POLICIES = ("finish", "retry_if_no_token", "cut")
DEFAULT_STANDBY_S = 3600


@dataclass(frozen=True, slots=True)
class Placed:
    """A version in a role of an endpoint, with all that a slot needs to load it."""

    name: str
    artifact: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    runtime: str = ""
    runtime_digest: str = ""


@dataclass(frozen=True, slots=True)
class EndpointState:
    """One endpoint row with its versions resolved.

    ``retired`` left its role, stays resident without a route until ``retired_until``, and serves again only when
    somebody names it. ``rejected`` are the names of versions that were rolled back. ``rollout`` is the id of the rollout
    that holds the candidate, with the shares of requests that are copied for it. ``ending`` says how requests end that
    run on a version which the newest change took the route from.
    """

    name: str
    incarnation: str
    generation: int
    salt: str
    live: Placed
    previous: Placed | None
    candidate: Placed | None
    canary_bp: int
    queue_cap: int
    deadline_s: float
    store_texts: bool
    in_flight: str = "finish"
    standby_s: int = DEFAULT_STANDBY_S
    retired: Placed | None = None
    retired_until: datetime | None = None
    rejected: frozenset[str] = frozenset()
    rollout: str = ""
    shadow_bp: int = 0
    self_bp: int = 0
    score_bp: int = 0
    ending: str = "finish"

    def placed(self) -> dict[str, Placed]:
        """The version of every filled role."""
        roles = {role: getattr(self, role) for role in ROLES}
        return {role: placed for role, placed in roles.items() if placed is not None}


def names_of(state: EndpointState) -> frozenset[str]:
    """Names of the versions that have a role."""
    return frozenset(placed.name for placed in state.placed().values())


def route_of(state: EndpointState) -> Route:
    """The whole route, so that applying it twice, late, or after a wipe ends in the same state."""
    return Route(
        endpoint=state.name,
        incarnation=state.incarnation,
        generation=state.generation,
        live=state.live.name,
        previous=_name_of(state.previous),
        candidate=_name_of(state.candidate),
        canary_bp=state.canary_bp,
        salt=state.salt,
        queue_cap=state.queue_cap,
        deadline_s=state.deadline_s,
        store_texts=state.store_texts,
        rollout=state.rollout,
        shadow_bp=state.shadow_bp,
        self_bp=state.self_bp,
        score_bp=state.score_bp,
    )


def residents_of(states: Iterable[EndpointState]) -> list[Resident]:
    """What slots should hold, the most wanted first: they claim from the front.

    Every live version comes before any previous one, which is the way back; then candidates, and last what is only
    kept to be looked at. With too few slots a rollout waits, and nobody is without an answer.
    """
    ordered = sorted(states, key=lambda state: state.name)
    wanted: dict[tuple[str, str], Resident] = {}
    for role in ROLES:
        for state in ordered:
            if (placed := state.placed().get(role)) is not None:
                # A version in two roles of one endpoint is held once, where it is wanted most.
                wanted.setdefault((state.name, placed.name), _resident(state.name, role, placed))
    return list(wanted.values())


def _resident(endpoint: str, role: str, placed: Placed) -> Resident:
    return Resident(
        endpoint,
        placed.name,
        placed.artifact,
        placed.engine_options,
        role=role,
        runtime=placed.runtime,
        runtime_digest=placed.runtime_digest,
    )


def _name_of(placed: Placed | None) -> str:
    return placed.name if placed else ""
