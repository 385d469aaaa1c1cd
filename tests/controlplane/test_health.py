"""Probes and counters of a web process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane.health import Counter, Health, Histogram, Metrics, NotReady


class Checks:
    """Checks whose outcome a test chooses, and that count how often they ran."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.runs = 0
        self.now = 0.0
        self.delay_s = 0.0

    async def database(self, resources: Mapping[str, Any]) -> str:
        """Fails as told."""
        self.runs += 1
        await asyncio.sleep(self.delay_s)
        if self.fault is not None:
            raise self.fault
        return str(resources["detail"])

    async def other(self, resources: Mapping[str, Any]) -> str:
        """Always holds."""
        return "fine"

    def health(self, **options: Any) -> Health:
        """Both checks on this clock."""
        checks = {"database": self.database, "other": self.other}
        return Health(checks, {"detail": "here"}, clock=lambda: self.now, **options)


@pytest.fixture
def checks() -> Checks:
    """Checks that hold."""
    return Checks()


async def test_every_check_is_told_with_its_detail(checks: Checks) -> None:
    outcomes = await checks.health().measure()

    assert {name: (found.ok, found.detail) for name, found in outcomes.items()} == {
        "database": (True, "here"),
        "other": (True, "fine"),
    }


async def test_a_check_that_fails_says_why(checks: Checks) -> None:
    checks.fault = NotReady("No disk.")
    outcomes = await checks.health().measure()

    assert (outcomes["database"].ok, outcomes["database"].detail) == (False, "No disk.")
    assert outcomes["other"].ok


async def test_a_check_that_hangs_is_not_ready(checks: Checks) -> None:
    checks.delay_s = 60
    outcomes = await checks.health(timeout_s=0.01).measure()

    assert outcomes["database"].detail == "no answer within 0.01 s"


async def test_many_probes_share_one_run_for_two_seconds(checks: Checks) -> None:
    health = checks.health()
    checks.delay_s = 0.01
    await asyncio.gather(*(health.measure() for _ in range(20)))
    checks.now = 1.99
    await health.measure()
    assert checks.runs == 1

    checks.fault = NotReady("Gone.")
    checks.now = 2.0
    assert not (await health.measure())["database"].ok
    assert checks.runs == 2


async def test_start_up_ends_once_and_for_all(checks: Checks) -> None:
    checks.fault = NotReady("Not yet.")
    health = checks.health(startup=("database",))
    assert not await health.has_started()

    checks.fault, checks.now = None, 2.0
    assert await health.has_started()

    checks.fault, checks.now = NotReady("Gone."), 4.0
    assert await health.has_started()
    assert not (await health.measure())["database"].ok


def test_a_process_without_checks_cannot_be_ready() -> None:
    with pytest.raises(ImproperlyConfigured, match="HEALTH_CHECKS is empty"):
        Health({}, {})


def test_a_start_up_check_must_exist(checks: Checks) -> None:
    with pytest.raises(ImproperlyConfigured, match="nobody"):
        checks.health(startup=("nobody",))


def test_a_counter_is_written_as_prometheus_reads_it() -> None:
    counter = Counter("c_total", "Help.", "name")
    counter.add("a")
    counter.add('q"\\\n', amount=12345678)

    assert list(counter.lines()) == [
        "# HELP c_total Help.",
        "# TYPE c_total counter",
        'c_total{name="a"} 1',
        'c_total{name="q\\"\\\\\\n"} 12345678',
    ]


def test_a_counter_without_labels_starts_at_zero() -> None:
    assert list(Counter("c", "Help.", kind="gauge").lines())[-1] == "c 0"


def test_a_histogram_is_cumulative_and_its_bounds_are_inclusive() -> None:
    histogram = Histogram("h", "Help.", "name")
    for seconds in (0.005, 0.3, 1000):
        histogram.observe(seconds, "a")
    lines = list(histogram.lines())

    assert 'h_bucket{name="a",le="0.005"} 1' in lines
    assert 'h_bucket{name="a",le="0.25"} 1' in lines
    assert 'h_bucket{name="a",le="0.5"} 2' in lines
    assert 'h_bucket{name="a",le="300"} 2' in lines
    assert lines[-3:] == [
        'h_bucket{name="a",le="+Inf"} 3',
        'h_sum{name="a"} 1000.305',
        'h_count{name="a"} 3',
    ]


def test_all_metrics_are_rendered_with_help_and_type() -> None:
    text = Metrics().render()

    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == text.count("# HELP")
    assert all(name.startswith("tatkal_") for name in names)
    assert text.endswith("\n")
