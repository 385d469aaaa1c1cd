"""What a ticket knows of a request: where each choice stands, and when the first token of any came."""

from __future__ import annotations

import pytest

from inference.engine.request import StepOutput
from inference.engine.ticket import Ticket, Work
from inference.protocol import Failure, FinishReason, QueueEntry, SamplingParams
from inference.queue import Delivery

FAILURE = Failure("numerical_error", "The logits are not numbers.", 500)


@pytest.fixture
def ticket() -> Ticket:
    """Two choices, come at second 10."""
    entry = QueueEntry("r1", "gw", 0, 0, 1, "live")
    return Ticket(Delivery("0-1", 1, entry), 10.0, 99.0, Work((1, 2), SamplingParams(), n=2))


def output(choice: int, index: int, *, is_last: bool = False) -> StepOutput:
    return StepOutput(
        request_id="r1",
        index=index,
        token_id=5,
        text="x",
        finish_reason=FinishReason.STOP if is_last else None,
        failure=None,
        num_prompt_tokens=2,
        num_output_tokens=index + 1,
        started_at=11.0,
        choice=choice,
    )


def test_the_first_token_is_that_of_the_fastest_choice(ticket: Ticket) -> None:
    ticket.advance(output(1, 0), 12.0)
    ticket.advance(output(0, 0), 15.0)
    row = ticket.advance(output(0, 1, is_last=True), 16.0)

    assert row.finish is not None
    assert (row.finish.queue_s, row.finish.first_token_s, row.finish.total_s) == (1.0, 2.0, 6.0)


def test_it_is_answered_when_every_choice_has_ended(ticket: Ticket) -> None:
    assert not ticket.has_rows
    ticket.advance(output(1, 0, is_last=True), 12.0)
    assert ticket.has_rows
    assert not ticket.is_answered

    ticket.advance(output(0, 0, is_last=True), 13.0)
    assert ticket.is_answered


def test_a_failure_takes_the_place_of_the_first_choices_next_token(ticket: Ticket) -> None:
    ticket.advance(output(1, 0), 12.0)
    assert (ticket.fail(FAILURE).choice, ticket.fail(FAILURE).seq) == (0, 0)

    ticket.advance(output(0, 0), 13.0)
    assert ticket.fail(FAILURE).seq == 1


def test_one_that_is_not_encoded_yet_is_not_answered() -> None:
    entry = QueueEntry("r1", "gw", 0, 0, 1, "live")

    assert not Ticket(Delivery("0-1", 1, entry), 10.0, 99.0).is_answered
