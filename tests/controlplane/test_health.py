"""Probes of a web process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane.health import Health, NotReady


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
