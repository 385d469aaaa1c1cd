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


def test_a_database_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        vendor = "postgresql"

        def cursor(self) -> None:
            raise DatabaseError("connection refused")

        def close(self) -> None: ...

    monkeypatch.setattr(checks, "connection", Gone())
    with pytest.raises(NotReady, match="connection refused"):
        async_to_sync(checks.check_database)({})
