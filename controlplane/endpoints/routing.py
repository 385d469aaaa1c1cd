"""From the state of an endpoint to what Redis is told: its route, and the versions slots should hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference.protocol import Resident, Route


@dataclass(frozen=True, slots=True)
class Placed:
    """A version in a role of an endpoint, with all that a slot needs to load it."""

    name: str
    artifact: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndpointState:
    """One endpoint row with its versions resolved."""

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


def route_of(state: EndpointState) -> Route:
    """The whole route, so that applying it twice, late, or after a wipe ends in the same state."""
    return Route(
        endpoint=state.name,
        incarnation=state.incarnation,
        generation=state.generation,
        live=state.live.name,
        previous=state.previous.name if state.previous else "",
        candidate=state.candidate.name if state.candidate else "",
        canary_bp=state.canary_bp,
        salt=state.salt,
        queue_cap=state.queue_cap,
        deadline_s=state.deadline_s,
        store_texts=state.store_texts,
    )


def residents_of(states: Iterable[EndpointState]) -> list[Resident]:
    """What slots should hold, the most wanted first: they claim from the front.

    Every live version comes before any previous one, which is the way back, and candidates come last: with too few
    slots a rollout waits, and nobody is without an answer.
    """
    ordered = sorted(states, key=lambda state: state.name)
    wanted = [
        (state.name, placed)
        for role in ("live", "previous", "candidate")
        for state in ordered
        if (placed := getattr(state, role)) is not None
    ]
    # A version in two roles of one endpoint is held once, where it is wanted most.
    first = {(endpoint, placed.name): placed for endpoint, placed in reversed(wanted)}
    names = dict.fromkeys((endpoint, placed.name) for endpoint, placed in wanted)
    return [
        Resident(
            endpoint, name, first[endpoint, name].artifact, first[endpoint, name].engine_options
        )
        for endpoint, name in names
    ]
