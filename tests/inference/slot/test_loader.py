"""The loader in this process: what it cannot say elsewhere does not end it."""

from __future__ import annotations

import threading

import pytest
import redis

from inference.protocol import Resident
from inference.queue import Queue
from inference.replicas import LoadFailure, Member, list_failures
from inference.slot import loading
from inference.slot.config import SlotConfig
from inference.slot.loading import Loader

RESIDENT = Resident("chat", "small/1", "/artifacts/1")


def _begin_load(resident: Resident, num_tries: int) -> LoadFailure:
    raise redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")


def test_a_try_that_cannot_be_counted_is_made_all_the_same(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "offer_to_oom_killer", lambda *_, **__: None)
    config = SlotConfig("slot-1", redis_url, engine="tests.inference.instant_engine:load")
    with Queue(redis_url) as queue:
        member = Member(queue, "slot-1", lease_ms=60_000)
        monkeypatch.setattr(member, "begin_load", _begin_load)
        loader = Loader(config, member, threading.Event(), oom_score=0)

        engine = loader.load(RESIDENT)

        assert engine is not None
        assert (member.status.kernel, member.status.fingerprint) == ("instant", "instant")
        assert list_failures(queue) == []
    assert "try cannot be counted version=small/1" in caplog.text
