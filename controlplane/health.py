"""/livez, /readyz, /startupz and /metrics of a web process.

A process names its conditions of readiness in ``settings.HEALTH_CHECKS``, and those that end its start-up in
``settings.STARTUP_CHECKS``. A check is an async callable that takes what the process holds (the ASGI lifespan state)
and returns a detail, or raises ``NotReady``.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse, JsonResponse
from django.urls import path

from controlplane.errors import DomainError

MAX_AGE_S = 2.0
CHECK_TIMEOUT_S = 1.0
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

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


class Counter:
    """A number per combination of label values; ``kind`` gauge where it may fall."""

    def __init__(self, name: str, help_text: str, *labels: str, kind: str = "counter") -> None:
        self.name = name
        self._help = help_text
        self._kind = kind
        self._labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *values: str, amount: float = 1) -> None:
        """Add ``amount`` under these label values, which must come from a bounded set."""
        self._values[values] = self._values.get(values, 0.0) + amount

    def lines(self) -> Iterator[str]:
        """Text of Prometheus's exposition format 0.0.4."""
        yield f"# HELP {self.name} {self._help}"
        yield f"# TYPE {self.name} {self._kind}"
        for values, number in self._values.items():
            yield f"{self.name}{_label_text(self._labels, values)} {number:.15g}"


class Histogram:
    """Seconds per combination of label values, in fixed buckets."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.name = name
        self._help = help_text
        self._labels = labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, *values: str) -> None:
        """Count one duration under these label values, which must come from a bounded set."""
        counts = self._counts.setdefault(values, [0] * (len(SECONDS_BUCKETS) + 1))
        counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self._sums[values] = self._sums.get(values, 0.0) + seconds

    def lines(self) -> Iterator[str]:
        """Text of Prometheus's exposition format 0.0.4; buckets are cumulative there."""
        yield f"# HELP {self.name} {self._help}"
        yield f"# TYPE {self.name} histogram"
        for values, counts in self._counts.items():
            total = 0
            for bound, count in zip((*SECONDS_BUCKETS, "+Inf"), counts, strict=True):
                total += count
                labels = _label_text((*self._labels, "le"), (*values, str(bound)))
                yield f"{self.name}_bucket{labels} {total}"
            labels = _label_text(self._labels, values)
            yield f"{self.name}_sum{labels} {self._sums[values]:.15g}"
            yield f"{self.name}_count{labels} {total}"


class Metrics:
    """What this process has counted since it started; workers of one port count for themselves."""

    def __init__(self) -> None:
        self.requests = Counter(
            "tatkal_http_requests_total", "Requests that ended.", "endpoint", "status"
        )
        self.in_flight = Counter(
            "tatkal_http_requests_in_flight", "Requests that have not ended.", kind="gauge"
        )
        self.latency = Histogram(
            "tatkal_e2e_request_latency_seconds", "First byte in to last byte out.", "endpoint"
        )
        self.first_token = Histogram(
            "tatkal_time_to_first_token_seconds", "Request read to first text.", "endpoint"
        )
        self.prompt_tokens = Counter(
            "tatkal_prompt_tokens_total", "Prompt tokens of whole answers.", "endpoint"
        )
        self.generation_tokens = Counter(
            "tatkal_generation_tokens_total", "Output tokens of whole answers.", "endpoint"
        )

    def render(self) -> str:
        """All of it, for Prometheus."""
        lines = [line for metric in vars(self).values() for line in metric.lines()]
        return "\n".join(lines) + "\n"


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
    """The counters of this process."""
    text = request.scope["state"]["metrics"].render()
    return HttpResponse(text, content_type="text/plain; version=0.0.4; charset=utf-8")


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


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
