"""/livez, /readyz, /startupz and /metrics of a web process.

A process names its conditions of readiness in ``settings.HEALTH_CHECKS``, and those that end its start-up in
``settings.STARTUP_CHECKS``. A check is an async callable that takes what the process holds (the ASGI lifespan state)
and returns a detail, or raises ``NotReady``. Numbers that are read when they are asked for are named in
``settings.METRICS``: async callables that take the same and return a ``Counter``, or raise ``NotReady``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse, JsonResponse
from django.urls import path

from controlplane.errors import DomainError
from controlplane.metrics import Metrics

MAX_AGE_S = 2.0
CHECK_TIMEOUT_S = 1.0

Check = Callable[[Mapping[str, Any]], Awaitable[str]]


class NotReady(DomainError):
    """A condition of readiness does not hold; the message says which and why."""

    code = "not_ready"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    permanent = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found."""

    ok: bool
    detail: str


class Health:
    """The checks of one process, run at most once per ``max_age_s``, however many probes ask.

    A process without checks could never be unready, so having none is an error.
    """

    def __init__(
        self,
        checks: Mapping[str, Check],
        resources: Mapping[str, Any],
        *,
        startup: Iterable[str] = (),
        max_age_s: float = MAX_AGE_S,
        timeout_s: float = CHECK_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not checks:
            raise ImproperlyConfigured("HEALTH_CHECKS is empty; name at least one check.")
        if unknown := set(startup) - checks.keys():
            raise ImproperlyConfigured(f"STARTUP_CHECKS names unknown checks {sorted(unknown)}.")
        self._checks = checks
        self._resources = resources
        self._startup = frozenset(startup)
        self._max_age_s = max_age_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._measured_at = float("-inf")
        self._outcomes: dict[str, Outcome] = {}
        self._has_started = False

    async def measure(self) -> Mapping[str, Outcome]:
        """What every check found, at most ``max_age_s`` ago."""
        async with self._lock:
            if self._clock() - self._measured_at >= self._max_age_s:
                found = await asyncio.gather(*(self._run(check) for check in self._checks.values()))
                self._outcomes = dict(zip(self._checks, found, strict=True))
                self._measured_at = self._clock()
        return self._outcomes

    async def has_started(self) -> bool:
        """Whether every start-up check has passed once; it stays true when one fails later."""
        if not self._has_started:
            outcomes = await self.measure()
            self._has_started = all(outcomes[name].ok for name in self._startup)
        return self._has_started

    async def _run(self, check: Check) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                return Outcome(True, await check(self._resources))
        except NotReady as error:
            return Outcome(False, error.message)
        except TimeoutError:
            return Outcome(False, f"no answer within {self._timeout_s:g} s")


async def livez(_request: ASGIRequest) -> HttpResponse:
    """200 whenever the event loop still turns; a process that does not answer in time is to be restarted."""
    return JsonResponse({"status": "ok"})


async def readyz(request: ASGIRequest) -> HttpResponse:
    """200 with every detail while all checks hold, else 503 with the same shape."""
    outcomes = await _health_of(request).measure()
    is_ready = all(outcome.ok for outcome in outcomes.values())
    return _report(is_ready, outcomes)


async def startupz(request: ASGIRequest) -> HttpResponse:
    """200 once start-up is over, which a later fault does not undo; 503 before."""
    health = _health_of(request)
    return _report(await health.has_started(), await health.measure())


async def metrics(request: ASGIRequest) -> HttpResponse:
    """The counters of this process; in a thread, because some are asked of Redis."""
    counted: Metrics = request.scope["state"]["metrics"]
    accept = request.headers.get("accept", "")
    text, content_type = await asyncio.to_thread(counted.render, accept)
    return HttpResponse(text, content_type=content_type)


urlpatterns = [
    path("livez", livez),
    path("readyz", readyz),
    path("startupz", startupz),
    path("metrics", metrics),
]
PATHS = frozenset({"/livez", "/readyz", "/startupz", "/metrics"})


def _health_of(request: ASGIRequest) -> Health:
    health: Health = request.scope["state"]["health"]
    return health


def _report(is_ok: bool, outcomes: Mapping[str, Outcome]) -> HttpResponse:
    checks = {
        name: {"ok": outcome.ok, "detail": outcome.detail} for name, outcome in outcomes.items()
    }
    status = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
    return JsonResponse(
        {"status": "ok" if is_ok else "unavailable", "checks": checks}, status=status
    )
