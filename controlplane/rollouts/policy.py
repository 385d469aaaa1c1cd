"""What a candidate has to show, on which segments, with which risk: parsed from JSON, with named defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from controlplane.errors import DomainError
from drift.eprocess import DIFFERENCE, RATE, Support

KEYS = ("lang", "topic", "tenant")
SHADOW, CANARY = "shadow", "canary"
MODES = (SHADOW, CANARY)


class InvalidPolicy(DomainError):
    """A policy that cannot be used; the message names the field, the value and the mend."""

    code = "invalid_policy"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class Kind(StrEnum):
    """How a metric is measured."""

    FLAGS = "flags"  # a loss of 1 for an answer with one of the flags, or without an answer
    SCORE = "score"  # a number in [0, 1] per answer, 1 is worst
    COST = (
        "cost"  # cost per 1k tokens, compared as (candidate - incumbent) / (candidate + incumbent)
    )
    LATENCY = "latency"  # how often a request exceeds a limit


@dataclass(frozen=True, slots=True)
class MetricRule:
    """One gate.

    A candidate fails on a segment when it is shown to be worse than ``tolerance``, and passes when it is shown to be
    no worse than the margin. ``modes`` are the kinds of traffic that count: latency of shadow copies, which run at
    a lower priority, is not among the defaults. ``minimum`` is the sample below which no number is shown.
    """

    name: str
    kind: Kind
    tolerance: float
    margin: float
    overall_margin: float
    minimum: int
    segment_minimum: int
    modes: tuple[str, ...]
    flags: frozenset[str] | None = None
    field: str = ""
    quantile: float = 0.99
    slack: float = 1.2
    limit_ms: float | None = None

    @property
    def support(self) -> Support:
        """What an observation may be."""
        return RATE if self.kind is Kind.LATENCY else DIFFERENCE


@dataclass(frozen=True, slots=True)
class Discovery:
    """Propose a slice after every so many observations, from leaves with at least ``minimum`` of them."""

    every: int = 2_000
    minimum: int = 50


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything a verdict depends on besides the data. Frozen when a rollout starts."""

    metrics: tuple[MetricRule, ...]
    alpha: float = 0.05
    keys: tuple[str, ...] = KEYS
    crossings: tuple[tuple[str, ...], ...] = ()
    minimum: int = 100
    block_s: float = 900.0
    min_coverage: float = 0.5
    users_once_per_block: bool = False
    discovery: Discovery | None = field(default_factory=Discovery)


# Whole requests for the tail: 299 without an exceedance are the least that any statement about a p99 needs, and small
# segments are not asked for one.
DEFAULTS: dict[Kind, dict[str, Any]] = {
    Kind.FLAGS: {
        "tolerance": 0.02,
        "margin": 0.05,
        "overall_margin": 0.02,
        "minimum": 100,
        "modes": MODES,
    },
    Kind.SCORE: {
        "tolerance": 0.02,
        "margin": 0.05,
        "overall_margin": 0.02,
        "minimum": 100,
        "modes": MODES,
    },
    Kind.COST: {
        "tolerance": 0.05,
        "margin": 0.05,
        "overall_margin": 0.05,
        "minimum": 100,
        "modes": MODES,
    },
    Kind.LATENCY: {
        "tolerance": 0.01,
        "margin": 0.01,
        "overall_margin": 0.01,
        "minimum": 300,
        "segment_minimum": 10_000,
        "modes": (CANARY,),
    },
}
DEFAULT_DOCUMENT: dict[str, Any] = {
    "metrics": {"flag_rate": {"kind": "flags"}, "p99_latency": {"kind": "latency"}}
}


def parse_policy(document: Any) -> Policy:
    """The policy of a JSON object; what it leaves out has defaults.

    Raises:
        InvalidPolicy: a field is unknown, of the wrong type, or out of range.
    """
    given = _object(document, "policy")
    _refuse_unknown(
        given,
        "policy",
        {
            "metrics",
            "alpha",
            "segments",
            "block_s",
            "min_coverage",
            "users_once_per_block",
            "discovery",
        },
    )
    metrics = _object(given.get("metrics", DEFAULT_DOCUMENT["metrics"]), "metrics")
    if not metrics:
        raise InvalidPolicy("metrics is empty: name at least one metric.")
    segments = _object(given.get("segments", {}), "segments")
    _refuse_unknown(segments, "segments", {"keys", "crossings", "minimum"})
    return Policy(
        metrics=tuple(_parse_metric(name, rule) for name, rule in sorted(metrics.items())),
        alpha=_number(given, "alpha", 0.05, low=0, high=0.5),
        keys=_strings(segments, "keys", KEYS),
        crossings=tuple(_crossing(one) for one in _list(segments, "crossings", ())),
        minimum=_count(segments, "minimum", 100),
        block_s=_number(given, "block_s", 900.0, low=0, high=7 * 86_400),
        min_coverage=_number(given, "min_coverage", 0.5, low=-1, high=1.000001),
        users_once_per_block=_flag(given, "users_once_per_block"),
        discovery=_parse_discovery(given.get("discovery", {})),
    )


def read_policy(text: str) -> Policy:
    """The policy in a JSON text.

    Raises:
        InvalidPolicy: the text is no JSON, or no policy.
    """
    try:
        return parse_policy(json.loads(text))
    except json.JSONDecodeError as error:
        raise InvalidPolicy(f"The policy is not JSON: {error}.") from error


def default_policy() -> Policy:
    """Any flag is a loss, and the p99 may be 1.2 times the incumbent's."""
    return parse_policy(DEFAULT_DOCUMENT)


def _parse_metric(name: str, document: Any) -> MetricRule:
    where = f"metrics.{name}"
    given = _object(document, where)
    try:
        kind = Kind(given.get("kind", ""))
    except ValueError:
        kinds = ", ".join(Kind)
        raise InvalidPolicy(f"{where}.kind={given.get('kind')!r} must be one of {kinds}.") from None
    own = {
        Kind.FLAGS: {"flags"},
        Kind.SCORE: {"field"},
        Kind.COST: {"field"},
        Kind.LATENCY: {"quantile", "slack", "limit_ms", "segment_minimum"},
    }
    shared = {"kind", "tolerance", "margin", "overall_margin", "minimum", "modes"}
    _refuse_unknown(given, where, shared | own[kind])
    rule = _metric_of(name, kind, _fill(kind, given, where), where)
    if min(rule.margin, rule.overall_margin) < rule.tolerance:
        raise InvalidPolicy(
            f"{where}: margin={rule.margin} and overall_margin={rule.overall_margin} must be at least "
            f"tolerance={rule.tolerance}, or one candidate could pass and fail at once."
        )
    return rule


def _fill(kind: Kind, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What is given, and defaults that fit it: a tail may exceed its limit as often as its quantile says."""
    values = DEFAULTS[kind] | dict(given)
    if kind is Kind.LATENCY and "quantile" in given:
        budget = 1 - _number(given, "quantile", 0.99, low=0, high=1, where=where)
        values |= {key: given.get(key, budget) for key in ("tolerance", "margin")}
    if "overall_margin" not in given:
        margin = _number(values, "margin", 0.0, low=-1, high=1, where=where)
        default = margin if kind is Kind.LATENCY else values["overall_margin"]
        values["overall_margin"] = min(margin, default)
    return values


def _metric_of(name: str, kind: Kind, values: Mapping[str, Any], where: str) -> MetricRule:
    modes = _strings(values, "modes", MODES, where)
    if unknown := sorted(set(modes) - set(MODES)):
        raise InvalidPolicy(f"{where}.modes: {unknown[0]!r} must be one of {', '.join(MODES)}.")
    flags = values.get("flags")
    field_name = str(values.get("field", ""))
    if kind in (Kind.SCORE, Kind.COST) and not field_name:
        raise InvalidPolicy(f"{where}.field is missing: name the field of a row that holds it.")
    low = 0.0 if kind is Kind.LATENCY else -1.0
    limit = values.get("limit_ms")
    return MetricRule(
        name=name,
        kind=kind,
        tolerance=_number(values, "tolerance", 0.02, low=low, high=1, where=where),
        margin=_number(values, "margin", 0.05, low=low, high=1, where=where),
        overall_margin=_number(values, "overall_margin", 0.02, low=low, high=1, where=where),
        minimum=_count(values, "minimum", 100, where),
        segment_minimum=_count(values, "segment_minimum", 1, where),
        modes=modes,
        flags=None if flags is None else frozenset(_strings(values, "flags", (), where)),
        field=field_name,
        quantile=_number(values, "quantile", 0.99, low=0, high=1, where=where),
        slack=_number(values, "slack", 1.2, low=0, high=100, where=where),
        limit_ms=None
        if limit is None
        else _number(values, "limit_ms", 0.0, low=0, high=1e9, where=where),
    )


def _parse_discovery(document: Any) -> Discovery | None:
    if document is None or document is False:
        return None
    given = _object(document, "discovery")
    _refuse_unknown(given, "discovery", {"every", "minimum"})
    return Discovery(
        every=_count(given, "every", 2_000, "discovery"),
        minimum=_count(given, "minimum", 50, "discovery"),
    )


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidPolicy(f"{where}={value!r} must be an object.")
    return value


def _refuse_unknown(given: Mapping[str, Any], where: str, known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise InvalidPolicy(f"{where}.{unknown[0]} is unknown: use {', '.join(sorted(known))}.")


def _number(
    given: Mapping[str, Any],
    key: str,
    default: float,
    *,
    low: float,
    high: float,
    where: str = "policy",
) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise InvalidPolicy(f"{where}.{key}={value!r} must be a number between {low} and {high}.")
    return float(value)


def _count(given: Mapping[str, Any], key: str, default: int, where: str = "segments") -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidPolicy(f"{where}.{key}={value!r} must be a whole number from 1.")
    return value


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise InvalidPolicy(f"{key}={value!r} must be true or false.")
    return value


def _list(given: Mapping[str, Any], key: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
    value = given.get(key, default)
    if not isinstance(value, list | tuple):
        raise InvalidPolicy(f"{key}={value!r} must be a list.")
    return tuple(value)


def _strings(
    given: Mapping[str, Any], key: str, default: tuple[str, ...], where: str = "segments"
) -> tuple[str, ...]:
    values = _list(given, key, default)
    if not all(isinstance(value, str) for value in values):
        raise InvalidPolicy(f"{where}.{key}={list(values)!r} must be a list of texts.")
    return values


def _crossing(value: Any) -> tuple[str, ...]:
    keys = _strings({"crossings": value}, "crossings", ())
    if len(set(keys)) < 2:
        raise InvalidPolicy(f"segments.crossings: {list(keys)!r} must name two keys or more.")
    return tuple(sorted(set(keys)))
