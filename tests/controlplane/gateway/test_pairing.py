"""What the gateway keeps of an answer that is to be compared, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from inference.protocol import Failure, GenerateRequest
from tests.controlplane.gateway.conftest import Served
from tests.controlplane.gateway.fakes import ENDPOINT, failure_row, text_row

CHAT: dict[str, Any] = {"model": ENDPOINT, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_flagged_answer_is_kept_whole_and_logged_without_its_texts(
    gateway: Served, stream: bool
) -> None:
    gateway.fake.kept_for = ("shadow", "self")
    with gateway.http() as client:
        client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    record = gateway.fake.wait_for_records()[0]

    (half,) = gateway.fake.answers
    assert (half.copy_of, half.arm, half.awaits) == (record.id, "live", ("shadow", "self"))
    assert (half.outcome, half.text, half.finish_reason) == ("ok", "Hello!", "stop")
    assert (half.rollout, half.fingerprint, half.store_texts) == ("r0", "fp", False)
    assert (half.prompt_tokens, half.completion_tokens) == (7, 3)
    assert (half.at, half.total_s) == (record.finished_at, record.total_s)
    request = GenerateRequest.from_json(half.request)
    assert request.messages is not None
    assert (request.id, request.messages[0].content) == (record.id, "Hi")
    assert (record.prompt, record.completion) == (None, None)


def test_an_answer_that_nobody_compares_is_not_kept(gateway: Served) -> None:
    with gateway.http() as client:
        client.post("/v1/chat/completions", json=CHAT)
    gateway.fake.wait_for_records()

    assert gateway.fake.answers == []


def test_a_failure_is_kept_as_the_incumbents(gateway: Served) -> None:
    gateway.fake.kept_for = ("shadow",)
    gateway.fake.script = [
        [text_row(0, "Hel")],
        [failure_row(1, Failure("generation_failed", "broke off", 500))],
    ]
    with gateway.http() as client:
        client.post("/v1/chat/completions", json=CHAT)
    gateway.fake.wait_for_records()

    (half,) = gateway.fake.answers
    assert (half.outcome, half.text) == ("generation_failed", "Hel")


def test_a_request_without_a_seed_gets_one_that_whoever_copies_it_has_too(
    gateway: Served,
) -> None:
    with gateway.http() as client:
        for body in (CHAT, CHAT, {**CHAT, "seed": 5}):
            client.post("/v1/chat/completions", json=body)

    first, second, given = (request.sampling.seed for request in gateway.fake.requests)
    assert given == 5
    assert first is not None
    assert second is not None
    assert first != second
    assert 0 <= first < 2**63
