"""What is asked before a candidate is loaded: whether there is room for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from controlplane.endpoints.routing import EndpointState, names_of, residents_of
from controlplane.endpoints.slots import Report


@dataclass(frozen=True, slots=True)
class Room:
    """A version that wants to be a candidate, beside all that slots are to hold, and what they report."""

    endpoint: str
    version: str
    size_bytes: int | None
    states: tuple[EndpointState, ...]
    report: Report


# Why the candidate does not fit; empty when it does.
FitsAsCandidate = Callable[[Room], str]


def fits_as_candidate(room: Room) -> str:
    """Whether a slot is left for the candidate when every version has one that is wanted already.

    A slot holds one version. Whether memory suffices ``endpoints.capacity`` tells beforehand, and the slot asks once more
    before it loads, so that what is live is not touched.
    """
    if _has_role(room.states, room.endpoint, room.version):
        return ""
    num_slots = len({slot.slot for slot in room.report.slots})
    num_wanted = len(residents_of(room.states))
    if num_wanted < num_slots:
        return ""
    return (
        f"{num_slots} slots report, and {num_wanted} versions are to be held already; start another slot, or let a "
        "candidate or a retired version go."
    )


def _has_role(states: Iterable[EndpointState], endpoint: str, version: str) -> bool:
    return any(state.name == endpoint and version in names_of(state) for state in states)
