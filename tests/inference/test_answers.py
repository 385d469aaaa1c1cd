"""Halves of pairs on their way: through JSON, and through a gateway that must not wait for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from inference import client as client_module
from inference.client import Client
from inference.protocol import Answer, FeedbackRecord, RequestRecord, Score, read_record
from inference.queue import Queue
from tests.factories import make_record

ANSWER = Answer(
    "r1", "live", "chat", "small/1", 1, "ro", "fp", "ok", 1.5, "Ähm.", "stop", awaits=("shadow",)
)


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        yield queue


@asynccontextmanager
async def started(url: str) -> AsyncIterator[Client]:
    client = Client(url)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def test_a_half_survives_json_and_one_of_another_release_is_read() -> None:
    scored = replace(ANSWER, score=Score((-0.5, -1.0), 1))
    assert Answer.from_json(scored.to_json()) == scored
    data = json.loads(ANSWER.to_json()) | {"of_tomorrow": 1}
    del data["store_texts"], data["score"], data["awaits"]
    assert Answer.from_json(json.dumps(data)) == replace(ANSWER, awaits=())


def test_the_log_holds_requests_and_what_callers_thought_of_them() -> None:
    record, feedback = make_record(), FeedbackRecord("r1", "k1", -0.5, 2.0, "No.")
    assert read_record(record.to_json()) == record
    assert read_record(feedback.to_json()) == feedback
    assert isinstance(read_record(record.to_json()), RequestRecord)


async def test_kept_halves_are_written_at_the_latest_when_the_gateway_ends(
    queue: Queue, redis_url: str
) -> None:
    async with started(redis_url) as client:
        for number in range(120):
            client.keep(replace(ANSWER, copy_of=f"r{number}"))

    halves = [each.answer for each in queue.read_answers()]
    assert [each.copy_of for each in halves] == [f"r{number}" for number in range(120)]
    assert halves[0] == replace(ANSWER, copy_of="r0")


async def test_what_is_too_much_or_cannot_be_written_is_dropped_and_counted(
    queue: Queue, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_BUFFERED_ANSWERS", 2)
    async with started(redis_url) as client:
        for text in ("kept", "half \ud800", "too much"):
            client.keep(replace(ANSWER, text=text))

    assert [each.answer.text for each in queue.read_answers()] == ["kept"]
    assert client.num_dropped_answers == 2


async def test_a_redis_that_is_away_keeps_nobody_waiting() -> None:
    client = Client("redis://127.0.0.1:1/0")
    for _ in range(600):
        client.keep(ANSWER)
    assert client.num_dropped_answers == 100
    await client.close()
