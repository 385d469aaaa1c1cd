"""A request counts its own tokens."""

from __future__ import annotations

import pytest

from inference.engine.request import Request, RequestRefused, Status
from inference.protocol import Failure, SamplingParams


def test_a_new_request_wants_its_whole_prompt_computed() -> None:
    request = Request.from_prompt("a", (5, 6, 7), SamplingParams())

    assert request.tokens == [5, 6, 7]
    assert request.num_output_tokens == 0
    assert request.num_uncomputed_tokens == 3
    assert request.status is Status.WAITING


def test_the_prompt_of_the_caller_is_not_extended_by_the_output() -> None:
    prompt = [5, 6, 7]

    Request.from_prompt("a", prompt, SamplingParams()).tokens.append(8)

    assert prompt == [5, 6, 7]


def test_a_computed_request_with_a_new_token_wants_one() -> None:
    request = Request.from_prompt("a", (5, 6, 7), SamplingParams())

    request.num_computed_tokens = 3
    request.tokens.append(8)

    assert request.num_output_tokens == 1
    assert request.num_uncomputed_tokens == 1


@pytest.mark.parametrize("status", list(Status))
def test_only_finished_and_aborted_requests_are_finished(status: Status) -> None:
    request = Request.from_prompt("a", (5,), SamplingParams())

    request.status = status

    assert request.is_finished == (status in {Status.FINISHED, Status.ABORTED})


def test_two_requests_with_equal_content_are_two_requests() -> None:
    one, other = (Request.from_prompt("a", (5,), SamplingParams()) for _ in range(2))

    assert one != other
    assert len({one, other}) == 2


def test_a_refusal_carries_what_the_caller_is_told() -> None:
    failure = Failure("context_length_exceeded", "Shorten it.", 400, "messages")

    refusal = RequestRefused(failure)

    assert refusal.failure == failure
    assert str(refusal) == "Shorten it."
