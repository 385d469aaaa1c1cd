"""``/metrics`` of a slot, scraped and parsed as Prometheus does, and what its report says of the engine."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from inference.calibration import write_calibration
from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.engine.loop import EngineLoop
from inference.planner.hardware import Calibration
from inference.protocol import GenerateRequest, Resident, Route, SamplingParams
from inference.queue import AsyncQueue, Lane, Queue
from inference.replicas import Member, SlotState, list_slots
from inference.slot import metrics as metrics_module
from inference.slot.loading import calibrate
from inference.slot.metrics import MetricsServer, SlotMetrics, open_metrics
from inference.slot.residency import Residency

LANE = Lane("chat", "small/1")
RESIDENT = Resident("chat", "small/1", "/artifact")
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
CALIBRATION = Calibration(
    machine="here",
    kernel="torch",
    num_threads=1,
    memory_bytes=2**30,
    cache_bytes=2**20,
    bandwidth=1e10,
    flops={"bf16": 1e11, "fp32": 1e11},
    measured_at="2026-03-01",
    method="by hand",
)


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        queue.apply_route(Route("chat", "a", 1, live="small/1"))
        yield queue


@pytest.fixture
def member(queue: Queue) -> Member:
    """A slot that reports that it is ready."""
    member = Member(queue, "slot-1", lease_ms=60_000)
    member.report(SlotState.READY, endpoint="chat", version="small/1", role="live", kernel="torch")
    assert member.renew()
    return member


@pytest.fixture
def residency(tiny_artifact: Path, queue: Queue, member: Member) -> Residency:
    """A tiny engine that has answered two requests, one of which was given up."""
    config = EngineConfig(
        tiny_artifact, dtype="float32", num_blocks=20, num_threads=1, max_model_len=64
    )
    engine = LLMEngine.load(config)
    engine.add_request("a", range(10), GREEDY)
    engine.add_request("b", range(20, 32), GREEDY)
    engine.step()
    engine.abort("b")
    while engine.has_unfinished:
        engine.step()
    loop = EngineLoop(engine, queue, LANE, member)
    return Residency(RESIDENT, engine, loop, member, oom_score=0)


@pytest.fixture
def server(residency: Residency, member: Member) -> Iterator[MetricsServer]:
    server = MetricsServer(SlotMetrics(lambda: member.status, lambda: residency), "127.0.0.1", 0)
    yield server
    server.close()


def scrape(server: MetricsServer) -> dict[str, list[Sample]]:
    """Samples by name."""
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=5).text
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_a_scrape_tells_what_the_engine_counted(
    server: MetricsServer, residency: Residency
) -> None:
    samples = scrape(server)
    value = {name: each[0].value for name, each in samples.items()}
    totals = residency.engine.telemetry.totals
    assert value["tatkal_prompt_tokens_total"] == 22
    assert value["tatkal_generation_tokens_total"] == totals.num_generated == 6
    assert value["tatkal_prefix_cache_queries_total"] == 22
    assert value["tatkal_engine_busy_seconds_total"] == pytest.approx(totals.busy_s)
    assert 0 < value["tatkal_engine_unbilled_seconds_total"] < totals.busy_s
    assert value["tatkal_estimated_flops_total"] == pytest.approx(totals.flops)
    assert value["tatkal_num_requests_running"] == 0
    assert value["tatkal_kv_cache_usage_perc"] == 0
    blocks = {each.labels["state"]: each.value for each in samples["tatkal_kv_cache_blocks"]}
    assert sum(blocks.values()) == residency.engine.usage().kv_blocks
    modes = {each.labels["mode"]: each.value for each in samples["tatkal_num_preemptions_total"]}
    assert modes == {"recompute": 0, "swap": 0}
    assert "process_resident_memory_bytes" in samples


def test_steps_are_in_histograms_that_add_up(server: MetricsServer, residency: Residency) -> None:
    samples = scrape(server)
    totals = residency.engine.telemetry.totals
    for name, total in (
        ("tatkal_iteration_tokens_total", 22 + totals.num_decode_tokens),
        ("tatkal_engine_step_seconds", totals.busy_s),
    ):
        buckets = [each.value for each in samples[f"{name}_bucket"]]
        assert buckets == sorted(buckets)
        assert buckets[-1] == samples[f"{name}_count"][0].value == totals.num_steps
        assert samples[f"{name}_sum"][0].value == pytest.approx(total)


def test_labels_say_slot_endpoint_and_version_and_name_no_caller(server: MetricsServer) -> None:
    labels = {
        name
        for samples in scrape(server).values()
        for sample in samples
        if sample.name.startswith("tatkal_")
        for name in sample.labels
    }
    assert labels == {"slot", "endpoint", "version", "state", "role", "kernel", "mode", "le"}


def test_a_slot_without_a_version_says_so(member: Member) -> None:
    server = MetricsServer(SlotMetrics(lambda: member.status, lambda: None), "127.0.0.1", 0)
    try:
        names = {name for name in scrape(server) if name.startswith("tatkal_")}
    finally:
        server.close()
    assert names == {"tatkal_slot_info"}


def test_a_taken_port_stops_no_slot_and_port_0_is_off(member: Member) -> None:
    metrics = SlotMetrics(lambda: member.status, lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert open_metrics(metrics, "127.0.0.1", taken.getsockname()[1]) is None
    assert open_metrics(metrics, "127.0.0.1", 0) is None


def test_who_connects_and_says_nothing_keeps_nobody_waiting_for_long(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < metrics_module._Handler.timeout <= 5
    monkeypatch.setattr(metrics_module._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)):
        assert "tatkal_slot_info" in scrape(server)


def test_the_report_carries_the_telemetry(
    residency: Residency, member: Member, queue: Queue
) -> None:
    residency.note_usage()
    assert member.renew()
    (status,) = list_slots(queue)
    told = status.telemetry
    assert told.keys() >= {
        "mbu", "mfu", "intensity", "flops_per_s", "bytes_per_s", "batch_rows", "tokens_per_s",
        "kv_used", "kv_cached", "kv_free", "num_preemptions", "prefix_hit_rate", "queue_age_s",
    }  # fmt: skip
    assert told["kv_used"] == 0
    assert told["tokens_per_s"] is not None
    assert told["tokens_per_s"] > 0
    assert (told["mbu"], told["mfu"]) == (None, None)
    assert len(status.to_json()) < 1500


def test_a_calibrated_machine_shows_how_much_of_it_is_used(
    residency: Residency, server: MetricsServer, tmp_path: Path
) -> None:
    calibrate(residency.engine, tmp_path)
    assert residency.telemetry()["mbu"] is None
    write_calibration(tmp_path, CALIBRATION)
    calibrate(residency.engine, tmp_path)
    mbu = residency.telemetry()["mbu"]
    assert mbu is not None
    assert 0 < mbu < 1
    assert scrape(server)["tatkal_model_bandwidth_utilization"][0].value == pytest.approx(
        mbu, rel=0.01
    )


def test_a_damaged_calibration_stops_nobody(residency: Residency, tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("{")
    calibrate(residency.engine, tmp_path)
    assert residency.telemetry()["mbu"] is None


async def test_the_queue_is_as_old_as_the_oldest_request_that_no_slot_has(
    residency: Residency, queue: Queue, member: Member, redis_url: str
) -> None:
    residency.note_usage()
    assert residency.telemetry()["queue_age_s"] == 0.0
    gateway = AsyncQueue(redis_url)
    for name in ("r1", "r2"):
        request = GenerateRequest(name, "chat", GREEDY, 30.0, prompt="Hello")
        await gateway.enqueue(request, "gw", "user")
        await asyncio.sleep(0.05)
    came_at = time.monotonic() - 0.1
    await gateway.close()
    oldest = member.oldest_waiting_at()
    assert oldest is not None
    assert oldest == pytest.approx(came_at, abs=0.04)
    residency.note_usage()
    age_s = residency.telemetry()["queue_age_s"]
    assert age_s is not None
    assert 0.09 <= age_s < 1.0

    assert len(queue.pull(LANE, member.consumer, 1, 100)) == 1
    later = member.oldest_waiting_at()
    assert later is not None
    assert later - oldest == pytest.approx(0.05, abs=0.03)
    queue.pull(LANE, member.consumer, 1, 100)
    assert member.oldest_waiting_at() is None
