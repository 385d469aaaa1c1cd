"""What a gateway counts of requests, as their callers saw them; vLLM's names where vLLM has one.

How the engines fare, each slot says itself: no name is exported by two kinds of process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.metrics import SECONDS_BUCKETS, Metrics
from inference.protocol import RequestRecord

LABELS = ("endpoint", "version")
MAX_SERIES = 200
"""Pairs of endpoint and version; beyond that the pair that was counted longest ago is forgotten."""

GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class Link(Protocol):
    """What is told of the client to the engines."""

    num_dropped_records: int
    num_dropped_answers: int

    @property
    def is_connected(self) -> bool:
        """Whether Redis answered the last time it was asked."""


class GatewayMetrics(Metrics):
    """The counters of one gateway process."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._labelled: list[Counter | Histogram] = []
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Request read to its end.", SECONDS_BUCKETS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Request read to first token.", SECONDS_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", GAP_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to the first step.", SECONDS_BUCKETS
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of whole answers.", TOKENS_BUCKETS
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of whole answers.", TOKENS_BUCKETS
        )
        self._engine_seconds = self._counter(
            "request_engine_seconds", "Engine seconds attributed to whole answers."
        )
        self._success = self._counter("request_success", "Whole answers.", "finished_reason")
        self._failure = self._counter("request_failure", "Requests without one, by code.", "code")

    def watch(self, link: Link) -> None:
        """Tell how the link to the engines fares, too; once."""
        self.registry.register(_LinkCollector(link))

    def count(self, record: RequestRecord) -> None:
        """A request of a known endpoint ended."""
        labels = self._labels(record.endpoint, record.version)
        if record.first_token_s is not None:
            self._first_token.labels(*labels).observe(record.first_token_s)
        if record.queue_s is not None:
            self._queue_time.labels(*labels).observe(record.queue_s)
        if record.outcome != "ok":
            self._failure.labels(*labels, record.outcome).inc()
            return
        self._success.labels(*labels, record.finish_reason).inc()
        self._latency.labels(*labels).observe(record.total_s)
        self._prompt_tokens.labels(*labels).observe(record.prompt_tokens)
        self._generation_tokens.labels(*labels).observe(record.completion_tokens)
        self._engine_seconds.labels(*labels).inc(record.engine_s or 0.0)

    def count_gap(self, endpoint: str, version: str, seconds: float, num_tokens: int) -> None:
        """``num_tokens`` came together, each so long after the one before it."""
        inter_token = self._inter_token.labels(*self._labels(endpoint, version))
        for _ in range(num_tokens):
            inter_token.observe(seconds)

    def _labels(self, endpoint: str, version: str) -> tuple[str, str]:
        pair = (endpoint, version)
        self._pairs[pair] = None
        self._pairs.move_to_end(pair)
        if len(self._pairs) > MAX_SERIES:
            oldest, _ = self._pairs.popitem(last=False)
            for metric in self._labelled:
                metric.remove_by_labels(dict(zip(LABELS, oldest, strict=True)))
        return pair

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(
            f"tatkal_{name}", help_text, LABELS, buckets=buckets, registry=self.registry
        )
        self._labelled.append(metric)
        return metric

    def _counter(self, name: str, help_text: str, *more: str) -> Counter:
        metric = Counter(f"tatkal_{name}", help_text, (*LABELS, *more), registry=self.registry)
        self._labelled.append(metric)
        return metric


class _LinkCollector(Collector):
    """Reads the client at a scrape."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def collect(self) -> Iterator[Metric]:
        """Three numbers."""
        yield CounterMetricFamily(
            "tatkal_dropped_records",
            "Lines that the request log lost because Redis was away or they could not be written.",
            value=self._link.num_dropped_records,
        )
        yield CounterMetricFamily(
            "tatkal_dropped_answers",
            "Incumbents' halves of pairs that were lost the same way.",
            value=self._link.num_dropped_answers,
        )
        yield GaugeMetricFamily(
            "tatkal_gateway_redis_up",
            "Whether Redis answered the last time this gateway asked.",
            value=float(self._link.is_connected),
        )
