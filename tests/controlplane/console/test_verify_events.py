"""``manage.py verify_events``: 0 for a whole chain, 1 and the first broken event otherwise."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from tests.controlplane.events.test_services import record_three, remove_guards, run_sql

pytestmark = pytest.mark.django_db


def test_a_whole_chain_is_counted() -> None:
    record_three()
    output = StringIO()
    call_command("verify_events", stdout=output)
    assert output.getvalue() == "3 events, all as they were written.\n"


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE events_event SET reason = 'x' WHERE sequence = 2", "Event 2 was changed"),
        ("DELETE FROM events_event WHERE sequence = 2", "Event 2 is missing before 3"),
        ("DELETE FROM events_event WHERE sequence = 3", "The chain ends at event 2, but 3"),
    ],
)
def test_a_broken_chain_is_an_error_that_names_the_first_broken_event(
    statement: str, told: str
) -> None:
    record_three()
    remove_guards()
    run_sql(statement)
    with pytest.raises(CommandError, match=told) as caught:
        call_command("verify_events")
    assert caught.value.returncode == 1
