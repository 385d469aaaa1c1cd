"""What a gateway counts of the requests it answered."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.gateway.metrics import MAX_SERIES, GatewayMetrics
from tests.controlplane.gateway.fakes import FakeClient
from tests.factories import make_record

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(metrics: GatewayMetrics) -> Samples:
    """Every sample, by name and labels."""
    text, _ = metrics.render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    """One sample of ``chat`` and ``tiny/1``."""
    labels = {"endpoint": "chat", "version": "tiny/1", **labels}
    return read(metrics)[f"tatkal_{name}", tuple(sorted(labels.items()))]


def test_a_whole_answer_is_counted_by_endpoint_and_version() -> None:
    metrics = GatewayMetrics()
    metrics.count(make_record(engine_s=0.25, total_s=0.9, first_token_s=0.05, queue_s=0.001))

    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "e2e_request_latency_seconds_sum") == 0.9
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.05
    assert value(metrics, "request_queue_time_seconds_sum") == 0.001
    assert value(metrics, "request_prompt_tokens_sum") == 12
    assert value(metrics, "request_generation_tokens_sum") == 34
    assert value(metrics, "request_engine_seconds_total") == 0.25


def test_a_failure_has_its_code_and_no_latency() -> None:
    metrics = GatewayMetrics()
    unplaced: dict[str, Any] = {"version": "", "queue_s": None, "first_token_s": None}
    metrics.count(make_record(outcome="queue_full", status=429, **unplaced))

    assert value(metrics, "request_failure_total", version="", code="queue_full") == 1
    names = {name for name, _ in read(metrics)}
    assert "tatkal_e2e_request_latency_seconds_count" not in names


def test_each_token_after_the_first_has_its_latency() -> None:
    metrics = GatewayMetrics()
    metrics.count_gap("chat", "tiny/1", 0.02, 3)

    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.025") == 3


def test_however_many_versions_come_and_go_the_series_stay_bounded() -> None:
    metrics = GatewayMetrics()
    for number in range(MAX_SERIES):
        metrics.count(make_record(version=f"tiny/{number}"))
    metrics.count(make_record(version="tiny/0"))
    for number in range(MAX_SERIES, MAX_SERIES + 5):
        metrics.count(make_record(version=f"tiny/{number}"))

    versions = {dict(labels).get("version") for _, labels in read(metrics)} - {None}
    assert len(versions) == MAX_SERIES
    assert {"tiny/0", f"tiny/{MAX_SERIES + 4}"} <= versions
    assert not {"tiny/1", "tiny/5"} & versions


def test_lines_that_the_log_lost_and_the_link_are_read_from_the_client() -> None:
    metrics, client = GatewayMetrics(), FakeClient()
    metrics.watch(client)
    client.num_dropped_records, client.is_connected = 7, False

    samples = read(metrics)
    assert samples["tatkal_dropped_records_total", ()] == 7
    assert samples["tatkal_gateway_redis_up", ()] == 0
