"""``/metrics`` of a slot: what its engine counted, in Prometheus's format, with vLLM's names where vLLM has one.

Everything is read when it is asked for, so that a step pays nothing for it. Labels are the slot and what it serves:
one set of them, whoever asks for what.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from inference.engine.telemetry import STEP_SECONDS_BUCKETS, STEP_TOKENS_BUCKETS, Telemetry
from inference.replicas import SlotStatus
from inference.slot.residency import Residency

logger = logging.getLogger(__name__)

LABELS = ("slot", "endpoint", "version")
CLIENT_TIMEOUT_S = 5.0


class SlotMetrics(Collector):
    """What a slot serves and how, at the moment of a scrape. Counters start anew with each version that is loaded."""

    def __init__(
        self, status: Callable[[], SlotStatus], residency: Callable[[], Residency | None]
    ) -> None:
        self._status = status
        self._residency = residency

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        status, residency = self._status(), self._residency()
        info = GaugeMetricFamily(
            "tatkal_slot_info",
            "1: what the slot holds, as what, and what computes its steps.",
            labels=(*LABELS, "state", "role", "kernel"),
        )
        labels = (status.slot, status.endpoint, status.version)
        info.add_metric((*labels, status.state.value, status.role, status.kernel), 1)
        yield info
        if residency is not None:
            yield from _gauges(residency, labels)
            yield from _counters(residency, labels)
            yield from _histograms(residency.engine.telemetry, labels)


def _gauges(residency: Residency, labels: Sequence[str]) -> Iterator[Metric]:
    usage, now = residency.engine.usage(), residency.telemetry()
    waiting = sum(not each.is_running for each in residency.loop.tickets())
    used = usage.kv_blocks_used / usage.kv_blocks if usage.kv_blocks else 0.0
    for name, help_text, value in (
        ("num_requests_running", "Sequences that hold KV blocks.", usage.num_running),
        (
            "num_requests_waiting",
            "Sequences in this slot that hold no KV blocks yet, or none any more.",
            usage.num_waiting + waiting,
        ),
        ("kv_cache_usage_perc", "Share of the KV blocks that sequences hold; 1 is all.", used),
        ("weight_bytes", "Bytes of the loaded weights.", usage.weight_bytes),
        (
            "queue_age_seconds",
            "How long the oldest request that computes nothing yet has waited, here or in the lane.",
            now["queue_age_s"],
        ),
        (
            "model_bandwidth_utilization",
            "Bytes moved while computing, as a share of the calibrated bandwidth; last seconds.",
            now["mbu"],
        ),
        (
            "model_flops_utilization",
            "Operations while computing, as a share of the calibrated rate; last seconds.",
            now["mfu"],
        ),
    ):
        if value is not None:
            yield _gauge(name, help_text, labels, value)
    yield _by_kind(
        GaugeMetricFamily("tatkal_kv_cache_blocks", "KV blocks.", labels=(*LABELS, "state")),
        labels,
        {name: now[f"kv_{name}"] or 0 for name in ("used", "cached", "free")},
    )


def _counters(residency: Residency, labels: Sequence[str]) -> Iterator[Metric]:
    usage, totals = residency.engine.usage(), residency.engine.telemetry.totals
    for name, help_text, value in (
        (
            "prompt_tokens",
            "Prompt positions computed, again after a preemption.",
            totals.num_prefill_tokens,
        ),
        ("generation_tokens", "Tokens chosen.", totals.num_generated),
        (
            "prefix_cache_queries",
            "Prompt tokens of requests that began.",
            totals.num_prefix_queries,
        ),
        ("prefix_cache_hits", "Those of them that were in the cache.", totals.num_prefix_hits),
        (
            "estimated_flops",
            "Floating-point operations, computed from the model's shape.",
            totals.flops,
        ),
        ("estimated_read_bytes", "Bytes read, computed from the model's shape.", totals.bytes_read),
        (
            "estimated_write_bytes",
            "Bytes written, computed from the model's shape.",
            totals.bytes_written,
        ),
        ("engine_busy_seconds", "Seconds in steps.", totals.busy_s),
        (
            "engine_unbilled_seconds",
            "Those of them that went to requests without an answer.",
            totals.unbilled_s,
        ),
    ):
        family = CounterMetricFamily(f"tatkal_{name}", help_text, labels=LABELS)
        family.add_metric(labels, value)
        yield family
    swaps = usage.num_swaps
    yield _by_kind(
        CounterMetricFamily(
            "tatkal_num_preemptions",
            "Sequences that gave their KV blocks back, by what became of their content.",
            labels=(*LABELS, "mode"),
        ),
        labels,
        {"recompute": usage.num_preemptions - swaps, "swap": swaps},
    )


def _histograms(telemetry: Telemetry, labels: Sequence[str]) -> Iterator[Metric]:
    totals = telemetry.totals
    yield _histogram(
        ("tatkal_iteration_tokens_total", "Tokens of a step."),
        labels,
        (STEP_TOKENS_BUCKETS, telemetry.step_tokens),
        totals.num_prefill_tokens + totals.num_decode_tokens,
    )
    yield _histogram(
        ("tatkal_engine_step_seconds", "Time of a step: plan, forward pass, sampling, text."),
        labels,
        (STEP_SECONDS_BUCKETS, telemetry.step_seconds),
        totals.busy_s,
    )


def _gauge(name: str, help_text: str, labels: Sequence[str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"tatkal_{name}", help_text, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _by_kind(
    family: GaugeMetricFamily | CounterMetricFamily,
    labels: Sequence[str],
    values: Mapping[str, float],
) -> Metric:
    for kind, value in values.items():
        family.add_metric((*labels, kind), value)
    return family


def _histogram(
    title: tuple[str, str],
    labels: Sequence[str],
    counted: tuple[Sequence[float], Sequence[int]],
    total: float,
) -> HistogramMetricFamily:
    bounds, counts = counted
    names = [*(f"{float(bound)}" for bound in bounds), "+Inf"]
    family = HistogramMetricFamily(*title, labels=LABELS)
    family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), total)
    return family


class _Handler(WSGIRequestHandler):
    """Gives up on who sends nothing, because others wait; and logs nothing, because scrapes are many."""

    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class MetricsServer:
    """Answers scrapes one after the other in a thread of its own; ``close`` it once."""

    def __init__(self, metrics: SlotMetrics, host: str, port: int) -> None:
        """Raises ``OSError`` if the port cannot be had; port 0 is any."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        ProcessCollector(registry=registry)
        app = make_wsgi_app(registry)
        self._server = make_server(host, port, app, WSGIServer, _Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()


def open_metrics(metrics: SlotMetrics, host: str, port: int) -> MetricsServer | None:
    """Serve ``metrics`` unless ``port`` is 0; a port that is taken is no reason not to serve requests."""
    if not port:
        return None
    try:
        return MetricsServer(metrics, host, port)
    except OSError as error:
        logger.warning("no metrics port=%d error=%s", port, error)
        return None
