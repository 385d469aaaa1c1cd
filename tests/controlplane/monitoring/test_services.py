"""How long the request log is kept, and the texts in it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.events.models import Event
from controlplane.monitoring import services
from controlplane.monitoring.models import Feedback, FlaggedTerm, RequestLog
from controlplane.monitoring.services import Expired, Retention, expire
from tests.factories import NOW, make_log_row

pytestmark = pytest.mark.django_db

RETENTION = Retention(rows=timedelta(days=30), texts=timedelta(days=7))


def test_texts_go_after_a_week_and_lines_after_a_month() -> None:
    for days in (0, 6, 8, 29, 31):
        make_log_row(
            request_id=f"d{days}",
            finished_at=NOW - timedelta(days=days),
            prompt="secret",
            completion="secret",
        )
    assert expire(retention=RETENTION, now=NOW) == Expired(num_rows=1, num_texts=2)
    left = {row.request_id: row.prompt for row in RequestLog.objects.all()}
    assert left == {"d0": "secret", "d6": "secret", "d8": None, "d29": None}


def test_expiring_twice_changes_nothing_more() -> None:
    make_log_row(finished_at=NOW - timedelta(days=8), prompt="secret")
    expire(retention=RETENTION, now=NOW)
    assert expire(retention=RETENTION, now=NOW) == Expired(0, 0)


def test_more_than_a_batch_goes_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "BATCH", 2)
    for _ in range(5):
        make_log_row(finished_at=NOW - timedelta(days=31))
    assert expire(retention=RETENTION, now=NOW).num_rows == 5
    assert not RequestLog.objects.exists()


def test_comments_go_with_texts_and_opinions_with_lines() -> None:
    for days in (1, 8, 31):
        Feedback.objects.create(
            request_id=f"d{days}",
            endpoint="chat",
            rating=1.0,
            comment="secret",
            at=NOW - timedelta(days=days),
        )
    expire(retention=RETENTION, now=NOW)

    left = {row.request_id: row.comment for row in Feedback.objects.all()}
    assert left == {"d1": "secret", "d8": None}
    assert [row.request_id for row in Feedback.objects.with_comment()] == ["d1"]


def test_a_term_is_saved_with_who_did_it_and_counts_while_it_is_active() -> None:
    term = FlaggedTerm(term="darn")
    services.save_term(term=term, actor="ada", now=NOW)
    assert FlaggedTerm.objects.active_terms() == ("darn",)
    term.is_active = False
    services.save_term(term=term, actor="ben", now=NOW)

    assert FlaggedTerm.objects.active_terms() == ()
    events = Event.objects.filter(type="flagged_term.saved").order_by("pk")
    assert [(event.actor, event.data["is_active"]) for event in events] == [
        ("ada", True),
        ("ben", False),
    ]
