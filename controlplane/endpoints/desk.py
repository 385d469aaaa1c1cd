"""What an operator has before them: an endpoint and how it fares, and the moves that can be made there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.utils import timezone

from controlplane.endpoints import services
from controlplane.endpoints.changes import Changed
from controlplane.endpoints.forms import CandidateForm, PromoteForm, RollbackForm, SettingsForm
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.publication import connection
from controlplane.endpoints.slots import Report, RoleReadiness, read_report, readiness
from controlplane.events.models import Event
from inference.queue import DeadLetter, QueueUnavailable
from inference.replicas import LoadFailure

logger = logging.getLogger(__name__)

NUM_EVENTS = 10
# As many as Redis keeps.
MAX_DEAD_LETTERS = 1000


@dataclass(frozen=True, slots=True)
class Desk:
    """What a person looks at: the endpoint, and how its versions fare; no report while Redis is away."""

    endpoint: Endpoint
    report: Report | None

    @property
    def roles(self) -> list[RoleReadiness]:
        """The filled roles, the most wanted first."""
        return readiness(state=self.endpoint.to_state(), report=self.report or Report())

    @property
    def ready(self) -> frozenset[str]:
        """Versions that could answer."""
        return self.report.ready_versions(self.endpoint.name) if self.report else frozenset()

    @property
    def is_settled(self) -> bool:
        """Whether everything is as it is to be."""
        return self.endpoint.is_published and all(role.is_ready for role in self.roles)

    @property
    def needs_force(self) -> bool:
        """Whether a rollback would leave a version that answers for one that cannot."""
        previous, live = self.endpoint.previous, self.endpoint.live
        if previous is None or self.report is None:
            return False
        return previous.name not in self.ready and live.name in self.ready


@dataclass(frozen=True, slots=True)
class Move:
    """One button: its form, what it does, and how its page looks."""

    name: str
    title: str
    button: str
    form: Callable[[Desk, Any], forms.Form]
    act: Callable[[Desk, Any, str], Changed]
    template: str = "move"


def tell(changed: Changed) -> str:
    """What became of a move, in one line."""
    state, published = changed.state, changed.published
    if not changed.is_changed:
        return f"Nothing to change: {state.live.name} is live at generation {state.generation}."
    if published is None:
        return (
            f"Generation {state.generation} is decided: {state.live.name} is live. Redis is away; it is published as "
            "soon as Redis is back, and until then the gateways go on as before."
        )
    if not published.requeued and not published.in_flight:
        return f"Generation {state.generation}: {state.live.name} is live, applied in {changed.applied_in_ms:.0f} ms."
    return (
        f"Generation {state.generation}: {state.live.name} is live, applied in {changed.applied_in_ms:.0f} ms. "
        f"{published.requeued} waiting requests were moved to it, {published.in_flight} still run on a version "
        "without a route."
    )


def tell_failure(failure: LoadFailure) -> str:
    """Why a version could not be loaded, when, by which slot, and how it goes on."""
    slot = failure.slot or "a slot"
    tries = f"{failure.count} tries" if failure.count > 1 else "one try"
    when = _at(failure.failed_at)
    on = (
        "it is being tried"
        if failure.is_under_way
        else f"the next try is at {_at(failure.retry_at)}"
    )
    return f"{failure.endpoint}, {slot}{f' at {when}' if when else ''}: {failure.detail.rstrip('.')}. After {tries}, {on}."


def _at(epoch_s: float) -> str:
    return f"{datetime.fromtimestamp(epoch_s, tz=UTC):%Y-%m-%d %H:%M:%S} UTC" if epoch_s else ""


def events_of(endpoint: Endpoint) -> list[dict[str, Any]]:
    """The newest changes with their reasons, also those that were given afterwards."""
    subject = Event.objects.about(f"endpoint:{endpoint.name}").order_by("-sequence")
    notes = {
        note.data["event"]: note
        for note in reversed(subject.filter(type="endpoint.annotated")[: NUM_EVENTS * 5])
    }
    return [
        {
            "event": event,
            "what": event.type.removeprefix("endpoint.").replace("_", " "),
            "data": event.data,
            "note": notes.get(event.sequence),
        }
        for event in subject.exclude(type="endpoint.annotated")[:NUM_EVENTS]
    ]


def look_at_dead_letters() -> list[DeadLetter] | None:
    """Every dead letter that is kept, the newest first; None while Redis is away."""
    try:
        return connection().read_dead(MAX_DEAD_LETTERS)
    except QueueUnavailable:
        logger.warning("dead letters unknown: redis is away")
        return None


def look(endpoints: list[str] | None = None) -> Report | None:
    """What the slots report, with the lanes of ``endpoints``; None while Redis is away."""
    try:
        return read_report(queue=connection(), endpoints=endpoints or [])
    except QueueUnavailable:
        logger.warning("slots unknown: redis is away")
        return None


def _promote(desk: Desk, form: Any, actor: str) -> Changed:
    return services.promote(
        version=form.cleaned_data["version"], **_decided(form), **_common(desk, actor)
    )


def _roll_back(desk: Desk, form: Any, actor: str) -> Changed:
    data = form.cleaned_data
    return services.rollback(
        from_version=data["leave"], force=data["force"], **_common(desk, actor)
    )


def _set_candidate(desk: Desk, form: Any, actor: str) -> Changed:
    data = form.cleaned_data
    return services.configure(
        candidate=data["candidate"],
        canary_bp=data["canary_bp"],
        **_decided(form),
        **_common(desk, actor),
    )


def _configure(desk: Desk, form: Any, actor: str) -> Changed:
    return services.configure(settings=form.settings(), **_decided(form), **_common(desk, actor))


def _common(desk: Desk, actor: str) -> dict[str, Any]:
    return {
        "name": desk.endpoint.name,
        "actor": actor,
        "now": timezone.now(),
        "queue": connection(),
    }


def _decided(form: Any) -> dict[str, Any]:
    return {name: form.cleaned_data[name] for name in ("reason", "expected_generation")}


def _rollback_form(desk: Desk, data: Any) -> forms.Form:
    return RollbackForm(data, initial={"leave": desk.endpoint.live.name, "force": desk.needs_force})


MOVES = (
    Move(
        "promote",
        "Promote",
        "Promote",
        lambda desk, data: PromoteForm(
            data, endpoint=desk.endpoint, roles=desk.roles, ready=desk.ready
        ),
        _promote,
    ),
    Move("rollback", "Roll back", "Roll back now", _rollback_form, _roll_back, "rollback"),
    Move(
        "candidate",
        "Candidate",
        "Set candidate",
        lambda desk, data: CandidateForm(data, endpoint=desk.endpoint, roles=desk.roles),
        _set_candidate,
    ),
    Move(
        "settings",
        "Settings",
        "Save",
        lambda desk, data: SettingsForm(data, endpoint=desk.endpoint, roles=desk.roles),
        _configure,
    ),
)
