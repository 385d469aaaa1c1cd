"""What was used, how fast it was, and what it cost: sums over the request log by version, key or endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from fractions import Fraction
from typing import Any, Final

from django.db.models import Aggregate, Count, F, Q, Sum, Window
from django.db.models.functions import RowNumber

from controlplane.monitoring.models import RequestLog, RequestLogQuerySet
from inference.planner.roofline import cost_per_1k_tokens

GROUPS: Final[Mapping[str, str]] = {"version": "version", "key": "key_id", "endpoint": "endpoint"}
"""What usage can be summed by, and the column that holds it."""

MAX_GROUPS = 200
QUANTILES: Final = {"p50": Fraction(1, 2), "p99": Fraction(99, 100)}
TIMES: Final = ("total_s", "first_token_s")

_OK = Q(outcome="ok")
_BILLED = _OK & Q(engine_s__isnull=False)
_SUMS: Final[Mapping[str, Aggregate]] = {
    "num_ok": Count("id", filter=_OK),
    "prompt_tokens": Sum("prompt_tokens", filter=_OK, default=0),
    "cached_tokens": Sum("cached_tokens", filter=_OK, default=0),
    "completion_tokens": Sum("completion_tokens", filter=_OK, default=0),
    "num_billed": Count("id", filter=_BILLED),
    "billed_tokens": Sum("completion_tokens", filter=_BILLED, default=0),
    "engine_s": Sum("engine_s", filter=_BILLED, default=0.0),
}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Times of ``n`` whole answers, by nearest rank; None where there are too few to have one beyond the quantile."""

    n: int = 0
    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """One group of requests. Tokens, seconds and times are of whole answers; ``num_requests`` counts all that ended.

    ``engine_s`` are the engine seconds attributed to ``num_billed`` of them, ``billed_tokens`` what these generated.
    """

    name: str
    num_requests: int = 0
    num_ok: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_billed: int = 0
    billed_tokens: int = 0
    engine_s: float = 0.0
    total_s: Quantiles = Quantiles()
    first_token_s: Quantiles = Quantiles()
    price_per_hour: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per attributed engine second, the prompts' share included."""
        return self.billed_tokens / self.engine_s if self.engine_s else None

    @property
    def engine_s_per_1k_tokens(self) -> float | None:
        """Engine seconds behind 1,000 generated tokens and their prompts."""
        return 1000 * self.engine_s / self.billed_tokens if self.billed_tokens else None

    @property
    def cost(self) -> float | None:
        """What the engine seconds cost."""
        return None if self.price_per_hour is None else self.engine_s * self.price_per_hour / 3600

    @property
    def cost_per_request(self) -> float | None:
        """On average over those that engine seconds are known of."""
        return self.cost / self.num_billed if self.cost is not None and self.num_billed else None

    @property
    def cost_per_1k_tokens(self) -> float | None:
        """What 1,000 generated tokens and their prompts cost."""
        if self.price_per_hour is None or not self.tokens_per_s:
            return None
        return cost_per_1k_tokens(self.price_per_hour, self.tokens_per_s)


def sum_usage(
    *, group_by: str, since: datetime, until: datetime, price_per_hour: float | None
) -> list[Usage]:
    """Usage from ``since`` to before ``until`` by a key of ``GROUPS``: the ``MAX_GROUPS`` with most requests, most first.

    Requests that no version answered are in no version's group.
    """
    column = GROUPS[group_by]
    rows = RequestLogQuerySet(RequestLog).filter(finished_at__gte=since, finished_at__lt=until)
    if group_by == "version":
        rows = rows.exclude(version="")
    found = {
        each["name"]: Usage(**each, price_per_hour=price_per_hour) for each in _sum(rows, column)
    }
    answers = rows.filter(_OK, **{f"{column}__in": list(found)})
    for time in TIMES:
        for name, quantiles in _find_quantiles(answers, column, time).items():
            measured: dict[str, Any] = {time: quantiles}
            found[name] = replace(found[name], **measured)
    return list(found.values())


def _sum(rows: RequestLogQuerySet, column: str) -> list[dict[str, Any]]:
    """The sums of each group, under the names that ``Usage`` has for them."""
    found: Iterable[Mapping[str, Any]] = (
        rows.values(group=F(column))
        .annotate(num=Count("id"), **{f"sum_{name}": each for name, each in _SUMS.items()})
        .order_by("-num", "group")[:MAX_GROUPS]
    )
    return [
        {
            "name": row["group"],
            "num_requests": row["num"],
            **{name: row[f"sum_{name}"] for name in _SUMS},
        }
        for row in found
    ]


def _find_quantiles(rows: RequestLogQuerySet, column: str, time: str) -> dict[str, Quantiles]:
    """In one pass: each time gets its rank in its group, and the database gives back the ranks that are asked for.

    Rank ``r`` of ``n`` is the nearest to a quantile ``q`` if ``n * q <= r < n * q + 1``; in whole numbers, with ``q`` as a
    fraction, ``r * denominator - n * numerator`` is from 0 to below the denominator.
    """
    ranked = rows.filter(**{f"{time}__isnull": False}).annotate(
        rank=Window(RowNumber(), partition_by=F(column), order_by=F(time).asc()),
        size=Window(Count("id"), partition_by=F(column)),
        **{
            name: F("rank") * each.denominator - F("size") * each.numerator
            for name, each in QUANTILES.items()
        },
    )
    wanted = Q()
    for name, each in QUANTILES.items():
        wanted |= Q(**{f"{name}__gte": 0, f"{name}__lt": each.denominator})
    found: dict[str, Quantiles] = {}
    for row in ranked.filter(wanted).values("size", *QUANTILES, group=F(column), time=F(time)):
        before = found.get(row["group"], Quantiles(row["size"]))
        found[row["group"]] = replace(before, **_fitting(row))
    return found


def _fitting(row: Mapping[str, Any]) -> dict[str, Any]:
    """The quantiles that the row's time is, unless so few lie beyond them that it could be anything."""
    return {
        name: row["time"]
        for name, each in QUANTILES.items()
        if 0 <= row[name] < each.denominator and row["size"] * (1 - each) >= 1
    }
