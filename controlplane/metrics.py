"""What a web process counts, and how Prometheus reads it.

Label values come from bounded sets: names of endpoints and versions that exist, codes of our own, HTTP statuses.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# A second series for each one, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has few types


class Metrics:
    """What every web process has counted since it started; workers of one port count for themselves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "tatkal_http_requests_total",
            "Requests that ended.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "tatkal_http_requests_in_flight",
            "Requests that have not ended.",
            registry=self.registry,
        )
        self.duration = Histogram(
            "tatkal_http_request_duration_seconds",
            "First byte in to last byte out.",
            ("endpoint",),
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All of it in a format that ``accept`` allows, and the content type; from any thread."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
