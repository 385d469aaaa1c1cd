"""The log stream becomes rows: nothing lost, nothing counted twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError

from controlplane.monitoring import intake as intakes
from controlplane.monitoring.intake import intake, row_of
from controlplane.monitoring.models import Feedback, RequestLog
from inference.protocol import FeedbackRecord, RequestRecord
from inference.queue import AsyncQueue, Queue, QueueUnavailable
from tests.factories import NOW, make_record

pytestmark = pytest.mark.django_db


def append(redis_url: str, records: Sequence[RequestRecord | FeedbackRecord]) -> None:
    """Write to the stream as gateways do."""

    async def write() -> None:
        gateway = AsyncQueue(redis_url)
        await gateway.append_log([record.to_json().encode() for record in records])
        await gateway.close()

    asyncio.run(write())


def test_every_record_becomes_one_row(queue: Queue, redis_url: str) -> None:
    append(redis_url, [make_record(id=f"a{n}") for n in range(7)])
    assert intake(queue=queue, now=NOW) == 7
    assert intake(queue=queue, now=NOW) == 0
    assert RequestLog.objects.count() == 7


def test_more_records_than_one_batch_are_read_in_one_call(
    queue: Queue, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intakes, "BATCH", 3)
    append(redis_url, [make_record() for _ in range(10)])
    assert intake(queue=queue, now=NOW) == 10


def test_a_crash_after_the_commit_counts_nothing_twice(
    queue: Queue, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(redis_url, [make_record(id=f"b{n}") for n in range(3)])
    with monkeypatch.context() as crash:
        crash.setattr(queue, "ack_log", lambda ids: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            intake(queue=queue, now=NOW)
    append(redis_url, [make_record(id="b3")])
    assert intake(queue=queue, now=NOW) == 4
    assert RequestLog.objects.count() == 4
    assert intake(queue=queue, now=NOW) == 0


def test_a_crash_before_the_commit_loses_nothing(
    queue: Queue, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(redis_url, [make_record() for _ in range(3)])
    with monkeypatch.context() as crash:

        def fail(*args: object, **kwargs: object) -> None:
            raise DatabaseError("disk full")

        crash.setattr(type(RequestLog.objects), "bulk_create", fail)
        with pytest.raises(DatabaseError):
            intake(queue=queue, now=NOW)
    assert intake(queue=queue, now=NOW) == 3
    assert RequestLog.objects.count() == 3


def test_a_row_holds_what_the_record_said() -> None:
    record = make_record(user="u1", tags={"topic": "refund"}, prompt="hi", completion=None)
    row = row_of(record)
    row.save()
    stored = RequestLog.objects.get(request_id=record.id)
    assert stored.finished_at == NOW
    assert stored.tags == {"topic": "refund"}
    assert (stored.prompt, stored.completion) == ("hi", None)
    assert (stored.first_token_s, stored.total_s) == (0.05, 0.9)


def test_names_that_do_not_fit_block_nothing(queue: Queue, redis_url: str) -> None:
    append(redis_url, [make_record(user="u" * 5000 + "\x00", completion="a\x00b"), make_record()])
    assert intake(queue=queue, now=NOW) == 2
    longest = RequestLog.objects.exclude(user="").get()
    assert len(longest.user) == 512
    assert longest.completion == "ab"


def test_rows_are_found_by_version_endpoint_and_time() -> None:
    for version in ("tiny/1", "tiny/2"):
        row_of(make_record(version=version)).save()
    assert RequestLog.objects.served_by("tiny/2").count() == 1
    assert RequestLog.objects.of_endpoint("chat").count() == 2
    assert not RequestLog.objects.finished_before(NOW).exists()
    assert RequestLog.objects.finished_before(datetime(2027, 1, 1, tzinfo=UTC)).count() == 2


def say(request_id: str, rating: float = 1.0, **fields: Any) -> FeedbackRecord:
    values: dict[str, Any] = {"key_id": "k1", "at": NOW.timestamp(), "comment": "Thanks."}
    return FeedbackRecord(request_id, rating=rating, **values | fields)


def test_feedback_joins_the_request_of_its_key(queue: Queue, redis_url: str) -> None:
    records = [make_record(id="a", arm="candidate"), make_record(id="b", prompt="Hi")]
    append(redis_url, [*records, say("a"), say("b", -0.5)])

    assert intake(queue=queue, now=NOW) == 4

    found = {row.request_id: (row.rating, row.arm, row.comment) for row in Feedback.objects.all()}
    assert found == {"a": (1.0, "candidate", None), "b": (-0.5, "live", "Thanks.")}
    assert Feedback.objects.of_version("tiny/1").of_endpoint("chat").count() == 2


def test_feedback_of_another_key_or_on_nothing_is_dropped(queue: Queue, redis_url: str) -> None:
    late = NOW + timedelta(seconds=61)
    append(redis_url, [make_record(id="a"), say("a", key_id="k2"), say("unknown")])

    intake(queue=queue, now=late)

    assert not Feedback.objects.exists()
    assert intake(queue=queue, now=late) == 0


def test_early_feedback_outlives_a_crash_in_the_next_batch(
    queue: Queue, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(redis_url, [say("a")])
    read_log, calls = queue.read_log, iter((True, False))

    def lose_redis(consumer: str, count: int) -> Any:
        if next(calls):
            return read_log(consumer, count)
        raise QueueUnavailable("gone")

    with monkeypatch.context() as crash:
        crash.setattr(queue, "read_log", lose_redis)
        with pytest.raises(QueueUnavailable):
            intake(queue=queue, now=NOW)
    append(redis_url, [make_record(id="a")])

    intake(queue=queue, now=NOW)

    assert Feedback.objects.get().rating == 1.0


def test_feedback_that_came_before_its_request_waits_for_it(queue: Queue, redis_url: str) -> None:
    append(redis_url, [say("a")])
    assert intake(queue=queue, now=NOW) == 1
    assert not Feedback.objects.exists()
    append(redis_url, [make_record(id="a")])

    intake(queue=queue, now=NOW)

    assert Feedback.objects.get().rating == 1.0
    assert intake(queue=queue, now=NOW) == 0


def test_the_last_word_counts_in_whatever_order_it_is_read(queue: Queue, redis_url: str) -> None:
    later = say("a", -1.0, at=NOW.timestamp() + 5)
    append(redis_url, [make_record(id="a"), later, say("a", 1.0)])
    intake(queue=queue, now=NOW)
    append(redis_url, [say("a", 0.5)])
    intake(queue=queue, now=NOW)

    assert Feedback.objects.get().rating == -1.0
