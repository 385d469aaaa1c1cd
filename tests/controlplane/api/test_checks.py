"""Readiness of the control process."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connection

from controlplane.api import checks
from controlplane.health import NotReady


@pytest.mark.django_db
def test_a_database_that_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(connection), "close", lambda self: None, raising=False)
    assert checks._query() == connection.vendor


def test_a_database_that_does_not_answer_is_told_and_the_error_is_for_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        vendor = "postgresql"

        def cursor(self) -> None:
            raise DatabaseError("connection to host db, user ada: refused")

        def close(self) -> None: ...

    monkeypatch.setattr(checks, "connection", Gone())
    with pytest.raises(NotReady) as caught:
        async_to_sync(checks.check_database)({})
    assert caught.value.message == "The database does not answer."
    assert "type=DatabaseError error=connection to host db" in caplog.text
