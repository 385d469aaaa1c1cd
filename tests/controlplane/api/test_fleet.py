"""What the control process tells Prometheus of lanes and slots."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.api import fleet
from controlplane.api.fleet import Fleet
from inference.protocol import Route
from inference.queue import Queue
from tests.controlplane.api.test_dead_letters import give_up
from tests.factories import hold_ready


def read() -> dict[str, dict[tuple[str, ...], float]]:
    """Every family: label values and their number."""
    registry = CollectorRegistry()
    registry.register(Fleet())
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        each.name: {tuple(sample.labels.values()): sample.value for sample in each.samples}
        for each in families
    }


def test_lanes_and_slots_are_counted(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "connection", lambda: queue)
    queue.apply_route(Route("chat", "i1", 1, live="tiny/1"))
    hold_ready(queue, "chat", "tiny/1")

    found = read()
    assert found["tatkal_redis_up"] == {(): 1}
    assert found["tatkal_num_requests_queued"] == {("chat", "tiny/1"): 0}
    assert found["tatkal_num_requests_in_flight"] == {("chat", "tiny/1"): 0}
    assert found["tatkal_dead_letters"] == {(): 0}
    assert found["tatkal_slots"] == {("chat", "ready", "tiny/1"): 1}


def test_dead_letters_are_counted_also_those_that_made_room(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "connection", lambda: queue)
    give_up(queue, 3)
    queue._redis.xtrim("dead", maxlen=1)

    assert read()["tatkal_dead_letters"] == {(): 3}


def test_without_redis_the_scrape_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Queue("redis://127.0.0.1:1/0")
    monkeypatch.setattr(fleet, "connection", lambda: away)

    assert read() == {"tatkal_redis_up": {(): 0}}
