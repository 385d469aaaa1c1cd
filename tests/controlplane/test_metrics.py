"""What every web process counts, as Prometheus's own parser reads it."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from controlplane.metrics import Metrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def test_counts_come_out_as_they_went_in() -> None:
    metrics = Metrics()
    metrics.requests.labels('q"\\\n', 200).inc(2)
    metrics.in_flight.inc()
    metrics.duration.labels("chat").observe(0.3)
    text, content_type = metrics.render()

    families = {each.name: each for each in text_string_to_metric_families(text.decode())}
    assert content_type.startswith("text/plain; version=0.0.4")
    (requests,) = families["tatkal_http_requests"].samples
    assert (requests.labels, requests.value) == ({"endpoint": 'q"\\\n', "status": "200"}, 2)
    assert families["tatkal_http_requests_in_flight"].samples[0].value == 1
    buckets = {
        sample.labels["le"]: sample.value
        for sample in families["tatkal_http_request_duration_seconds"].samples
        if sample.name.endswith("_bucket")
    }
    assert (buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (0, 1, 1)


def test_who_asks_for_openmetrics_gets_it() -> None:
    text, content_type = Metrics().render(OPENMETRICS)

    assert content_type.startswith("application/openmetrics-text")
    families = parse_openmetrics(text.decode())  # type: ignore[no-untyped-call]
    names = {each.name for each in families}
    assert "tatkal_http_requests" in names


def test_no_series_is_doubled_by_the_moment_it_began() -> None:
    metrics = Metrics()
    metrics.requests.labels("chat", 200).inc()

    assert b"_created" not in metrics.render()[0]


def test_two_processes_in_one_do_not_share_their_counts() -> None:
    Metrics().in_flight.inc()

    assert b"tatkal_http_requests_in_flight 0.0" in Metrics().render()[0]
