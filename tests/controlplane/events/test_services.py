"""The record of what happened: in the caller's transaction, in one chain, unchangeable."""

from __future__ import annotations

from importlib import import_module

import pytest
from django.db import DatabaseError, connection, transaction

from controlplane.events.models import AppendOnly, ChainHead, Event, Outbox
from controlplane.events.services import record, verify
from tests.factories import NOW

guards = import_module("controlplane.events.migrations.0002_append_only")

pytestmark = pytest.mark.django_db


def record_three() -> list[Event]:
    return [
        record(type="test.happened", subject=f"thing:{n}", actor="ada", now=NOW, data={"n": n})
        for n in range(3)
    ]


def remove_guards() -> None:
    statements = {
        "sqlite": guards.UNGUARD_SQLITE,
        "postgresql": guards.UNGUARD_POSTGRESQL,
    }[connection.vendor]
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def run_sql(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def test_each_event_follows_the_one_before_it() -> None:
    first, second, third = record_three()
    assert [first.sequence, second.sequence, third.sequence] == [1, 2, 3]
    assert second.previous_hash == first.hash
    assert third.previous_hash == second.hash
    assert verify().is_intact
    assert verify().num_events == 3


def test_an_event_reads_back_as_it_was_hashed() -> None:
    event = record(
        type="test.happened",
        subject="thing:1",
        actor="ada",
        reason="naïve “quotes”",
        now=NOW,
        data={"ratio": 1e16, "share": 0.1, "none": None},
    )
    stored = Event.objects.get(pk=event.pk)
    assert stored.computed_hash() == event.hash
    assert stored.data == {"ratio": 1e16, "share": 0.1, "none": None}


def test_an_event_with_a_topic_leaves_one_outbox_row() -> None:
    event = record(type="test.happened", subject="thing:1", actor="ada", now=NOW, topic="route")
    record(type="test.happened", subject="thing:2", actor="ada", now=NOW)
    assert [row.event for row in Outbox.objects.waiting("route")] == [event]
    assert not Outbox.objects.waiting("other").exists()


def test_a_change_that_is_rolled_back_leaves_no_event_and_no_gap() -> None:
    record_three()
    with transaction.atomic():
        record(type="test.happened", subject="thing:9", actor="ada", now=NOW, topic="route")
        transaction.set_rollback(True)
    assert not Event.objects.about("thing:9").exists()
    assert not Outbox.objects.exists()
    assert record(type="test.happened", subject="thing:4", actor="ada", now=NOW).sequence == 4
    assert verify().is_intact


def test_recording_outside_a_transaction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction.get_connection(), "in_atomic_block", False)
    with pytest.raises(transaction.TransactionManagementError, match="caller's transaction"):
        record(type="test.happened", subject="thing:1", actor="ada", now=NOW)


def test_data_that_is_not_finite_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        record(type="t", subject="s", actor="ada", now=NOW, data={"p99": float("nan")})


@pytest.mark.parametrize(
    "statement",
    ["UPDATE events_event SET actor = 'eve' WHERE sequence = 2", "DELETE FROM events_event"],
)
def test_the_database_refuses_to_change_events(statement: str) -> None:
    record_three()
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        run_sql(statement)
    assert verify().is_intact
    assert verify().num_events == 3


def test_the_models_refuse_to_change_events_before_the_database_does() -> None:
    event = record_three()[0]
    event.actor = "eve"
    with pytest.raises(AppendOnly):
        event.save()
    with pytest.raises(AppendOnly):
        event.delete()
    with pytest.raises(AppendOnly):
        Event.objects.update(actor="eve")
    with pytest.raises(AppendOnly):
        Event.objects.all().delete()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE events_event SET actor = 'eve' WHERE sequence = 2", "Event 2 was changed"),
        ("UPDATE events_event SET payload = '{}' WHERE sequence = 3", "Event 3 was changed"),
        ("DELETE FROM events_event WHERE sequence = 2", "Event 2 is missing"),
        ("DELETE FROM events_event WHERE sequence = 3", "ends at event 2, but 3"),
        ("DELETE FROM events_event", "ends at event 0, but 3"),
    ],
)
def test_tampering_past_the_triggers_is_found_and_named(statement: str, problem: str) -> None:
    record_three()
    remove_guards()
    run_sql(statement)
    verification = verify()
    assert not verification.is_intact
    assert problem in verification.problem


def test_there_is_one_head() -> None:
    with pytest.raises(DatabaseError), transaction.atomic():
        ChainHead.objects.create(pk=2)
