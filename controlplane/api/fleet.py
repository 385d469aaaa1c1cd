"""What Redis knows of lanes and slots, for Prometheus: read when it is asked for, by the control process alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.endpoints.publication import connection
from controlplane.endpoints.slots import read_report
from controlplane.metrics import Metrics
from inference.queue import QueueUnavailable

LANE = ("endpoint", "version")


class Fleet(Collector):
    """Lanes that are routed or not empty, and slots that have reported lately."""

    def collect(self) -> Iterator[Metric]:
        """Without Redis one number alone: that it is away."""
        up = GaugeMetricFamily("tatkal_redis_up", "Whether Redis answered the control process.")
        try:
            queue = connection()
            report = read_report(queue=queue, endpoints=queue.read_endpoints())
            num_dead = queue.count_dead()
        except QueueUnavailable:
            up.add_metric((), 0)
            yield up
            return
        up.add_metric((), 1)
        yield up
        queued = GaugeMetricFamily(
            "tatkal_num_requests_queued", "Requests in a lane that no slot has yet.", labels=LANE
        )
        in_flight = GaugeMetricFamily(
            "tatkal_num_requests_in_flight", "Requests of a lane that slots have.", labels=LANE
        )
        for endpoint, lanes in report.lanes.items():
            for lane in lanes:
                queued.add_metric((endpoint, lane.version), lane.num_queued)
                in_flight.add_metric((endpoint, lane.version), lane.num_in_flight)
        yield from (queued, in_flight)
        slots = GaugeMetricFamily(
            "tatkal_slots", "Engine slots by what they hold and do.", labels=(*LANE, "state")
        )
        states = Counter((each.endpoint, each.version, each.state.value) for each in report.slots)
        for labels, number in sorted(states.items()):
            slots.add_metric(labels, number)
        yield slots
        yield CounterMetricFamily(
            "tatkal_dead_letters",
            "Requests given up: their slots died under them.",
            value=num_dead,
        )


@asynccontextmanager
async def lifespan() -> AsyncIterator[Mapping[str, Any]]:
    """The counters of the control process, with the fleet's."""
    metrics = Metrics()
    metrics.registry.register(Fleet())
    yield {"metrics": metrics}
