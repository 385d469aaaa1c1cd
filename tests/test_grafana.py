"""The Grafana dashboard asks for nothing that no process exports, and misses nothing that one does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from controlplane.api import fleet
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.metrics import Metrics
from inference.engine.memory import Usage
from inference.engine.telemetry import ModelCost, Telemetry
from inference.protocol import Route
from inference.queue import Queue
from inference.replicas import SlotStatus
from inference.slot.metrics import SlotMetrics
from inference.slot.residency import Residency
from tests.controlplane.gateway.fakes import FakeClient
from tests.factories import hold_ready, make_record

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana" / "tatkal.json"
Exported = Mapping[str, set[str]]
"""Names of samples, and the labels that they have."""

ADDED_BY_PROMETHEUS = {"job", "instance"}


def read(registry: CollectorRegistry) -> dict[str, set[str]]:
    """What a scrape of ``registry`` has, beside facts of the process."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name.startswith("tatkal_"):
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def alone(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def gateway() -> dict[str, set[str]]:
    """A gateway that has answered, failed and lost a line."""
    metrics = GatewayMetrics()
    metrics.watch(FakeClient())
    metrics.requests.labels("chat", 200).inc()
    metrics.duration.labels("chat").observe(0.1)
    metrics.count(make_record(engine_s=0.5))
    metrics.count(make_record(outcome="cancelled"))
    metrics.count_gap("chat", "tiny/1", 0.01, 1)
    return read(metrics.registry)


def control(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """A control process with a routed endpoint and a ready slot."""
    monkeypatch.setattr(fleet, "connection", lambda: queue)
    queue.apply_route(Route("chat", "i1", 1, live="tiny/1"))
    hold_ready(queue, "chat", "tiny/1")
    metrics = Metrics()
    metrics.requests.labels("chat", 200).inc()
    metrics.duration.labels("chat").observe(0.1)
    metrics.registry.register(fleet.Fleet())
    return read(metrics.registry)


def slot() -> dict[str, set[str]]:
    """A slot on a machine that was measured, in the middle of an answer."""
    telemetry = {
        "mbu": 0.5,
        "mfu": 0.1,
        "queue_age_s": 0.0,
        "kv_used": 1,
        "kv_cached": 0,
        "kv_free": 3,
    }
    engine = SimpleNamespace(
        usage=lambda: Usage(4, 1, 4, 100), telemetry=Telemetry(ModelCost(1, 1, 1, 1, 1))
    )
    residency = SimpleNamespace(
        engine=engine, telemetry=lambda: telemetry, loop=SimpleNamespace(tickets=list)
    )
    status = SlotStatus("engine-0", "chat", "tiny/1")
    return read(alone(SlotMetrics(lambda: status, lambda: cast(Residency, residency))))


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        yield queue


@pytest.fixture
def exported(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Exported:
    """Everything that is scraped of the three kinds of process."""
    found: dict[str, set[str]] = {}
    for process in (gateway(), control(queue, monkeypatch), slot()):
        for name, labels in process.items():
            found.setdefault(name, set()).update(labels)
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def queries() -> Iterator[str]:
    """Of panels and of the menus above them."""
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]


def asked() -> set[str]:
    """Names of samples in all queries."""
    return {name for query in queries() for name in re.findall(r"\btatkal_\w+", query)}


def test_every_metric_that_a_panel_asks_for_is_exported(exported: Exported) -> None:
    assert len(asked()) > 20
    assert asked() <= exported.keys()


def test_every_label_that_a_query_picks_or_groups_by_is_there(exported: Exported) -> None:
    for query in queries():
        (name, *_), picked = re.findall(r"\btatkal_\w+", query), re.findall(r"(\w+)=~?\"", query)
        grouped = [
            label for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(", ")
        ]
        assert {*picked, *grouped} <= exported[name] | ADDED_BY_PROMETHEUS, query


def test_every_metric_of_tatkal_has_its_place_on_the_dashboard(exported: Exported) -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked()}
    left_out = {
        "tatkal_http_requests_in_flight",
        "tatkal_http_request_duration_seconds",
        "tatkal_request_prompt_tokens",
        "tatkal_weight_bytes",
    }
    assert families - shown == left_out


def test_no_two_kinds_of_process_export_one_name_but_for_http(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [gateway(), control(queue, monkeypatch), slot()]
    names = [name for each in processes for name in each if "_http_" not in name]
    assert len(names) == len(set(names))


def test_no_label_names_a_caller(exported: Exported) -> None:
    labels = {label for found in exported.values() for label in found}
    assert labels == {
        "code", "endpoint", "finished_reason", "kernel", "le", "mode", "role", "slot", "state", "status", "version",
    }  # fmt: skip


def test_panels_do_not_overlap_and_have_a_unit_and_a_description() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        place = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not place & cells, panel["title"]
        cells |= place
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
