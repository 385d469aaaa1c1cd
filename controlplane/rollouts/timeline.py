"""What happened to a rollout, and what people say of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any

from django.db import transaction

from controlplane.errors import DomainError
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.rollouts.models import Look, Rollout
from drift.verdict import Verdict

MAX_ENTRIES = 500
ANNOTATED = "rollout.annotated"  # says more of another event, and moved nothing
# What stands where somebody acted without saying why.
NO_REASONS = ("", "aborted", "rolled back")


class UnknownEvent(DomainError):
    """The rollout has no such event."""

    code = "unknown_event"
    status = HTTPStatus.NOT_FOUND


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a timeline: something that was done, or a look that says something new."""

    at: datetime
    kind: str
    type: str
    actor: str
    reason: str
    sequence: int | None
    data: Mapping[str, Any]


def timeline_of(rollout: Rollout) -> list[Entry]:
    """What happened, the newest first: events, and looks that said something new. At most ``MAX_ENTRIES`` of each."""
    events = Event.objects.about(rollout.subject).order_by("-sequence")[:MAX_ENTRIES]
    looks = rollout.looks.order_by("-number")[:MAX_ENTRIES]
    entries = [*map(_entry_of_event, events), *map(_entry_of_look, looks)]
    return sorted(entries, key=lambda entry: (entry.at, entry.sequence or 0), reverse=True)


def reason_of_last_move(rollout: Rollout) -> tuple[str, str]:
    """Why it stands where it stands, also when that was said afterwards; empty where nobody said, and who moved it."""
    about = Event.objects.about(rollout.subject).order_by("-sequence")
    move = about.exclude(type=ANNOTATED).first()
    if move is None:
        return "", ""
    if move.reason not in NO_REASONS:
        return move.reason, move.actor
    notes = (note for note in about.filter(type=ANNOTATED) if note.data["event"] == move.sequence)
    note = next(notes, None)
    return (note.reason if note else ""), move.actor


def annotate(*, rollout: Rollout, sequence: int, reason: str, actor: str, now: datetime) -> Event:
    """Add the reason for something that was done in a hurry, as an event about the event.

    Raises:
        UnknownEvent: the rollout has no event of that number.
    """
    if not Event.objects.about(rollout.subject).filter(sequence=sequence).exists():
        raise UnknownEvent(f"Rollout {rollout.key} has no event {sequence}.")
    with transaction.atomic():
        return record(
            type=ANNOTATED,
            subject=rollout.subject,
            actor=actor,
            reason=reason,
            now=now,
            data={"event": sequence},
        )


def _entry_of_event(event: Event) -> Entry:
    return Entry(
        event.at, "event", event.type, event.actor, event.reason, event.sequence, event.data
    )


def _entry_of_look(look: Look) -> Entry:
    data = {
        "number": look.number,
        "until": look.at.isoformat(),
        "step": look.step_index,
        "verdict": look.verdict,
        "decision": look.decision,
        "log_e_rollback": look.log_e_rollback,
        "failed": [
            {name: result[name] for name in ("metric", "segment", "name", "sentence")}
            for result in look.results
            if result["verdict"] == Verdict.FAIL
        ],
    }
    return Entry(look.since, "look", "rollout.look", "", look.reason, None, data)
