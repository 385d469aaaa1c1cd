"""What a candidate has to show, on which segments, with which risk: parsed from JSON, with named defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from controlplane.rollouts.documents import (
    InvalidPolicy,
    read_count,
    read_flag,
    read_list,
    read_number,
    read_object,
    read_strings,
    refuse_unknown,
)
from controlplane.rollouts.steps import DAY_S, MAX_S, StepRule, parse_steps
from controlplane.rollouts.steps import Kind as StepKind
from drift.eprocess import DIFFERENCE, RATE, Support
from drift.segments import Segment

KEYS = ("lang", "topic", "tenant")
LENGTH_BAND = "length_band"
TAG = "tags."
SHADOW, CANARY, SCORE = "shadow", "canary", "score"
MODES = (SHADOW, CANARY)
IN_FLIGHT = ("finish", "retry_if_no_token", "cut")


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
    a lower priority, is not among the defaults. ``minimum`` is the sample below which no number is shown. ``segments``
    are the keys whose values are judged one by one; without it all are, and of an empty one all traffic alone. A gate
    that is not ``critical`` never rolls back: when it fails, the rollout is held for somebody to decide.
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
    segments: tuple[str, ...] | None = None
    critical: bool = True

    def judges(self, segment: Segment) -> bool:
        """Whether this gate is asked for on ``segment``."""
        return self.segments is None or all(key in self.segments for key, _ in segment)

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
class SegmentTraffic:
    """What a segment brings per hour, and how often the incumbent fails on it."""

    segment: Segment
    per_hour: float
    loss_rate: float = 0.03


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything a verdict depends on besides the data, and the steps of a rollout. Frozen when a rollout starts.

    ``traffic`` is what the endpoint is expected to bring; its segments are judged however little they did bring lately.
    A candidate has ``prepare_s`` to be ready, and a rollout ``deadline_s`` in all, whatever people do. What is None is
    as the endpoint has it.
    """

    metrics: tuple[MetricRule, ...]
    alpha: float = 0.05
    keys: tuple[str, ...] = KEYS
    crossings: tuple[tuple[str, ...], ...] = ()
    minimum: int = 100
    block_s: float = 900.0
    min_coverage: float = 0.5
    users_once_per_block: bool = False
    discovery: Discovery | None = field(default_factory=Discovery)
    steps: tuple[StepRule, ...] = ()
    promotes: bool = False
    traffic: tuple[SegmentTraffic, ...] = ()
    in_flight: str | None = None
    standby_s: float | None = None
    prepare_s: float = 900.0
    deadline_s: float = 14 * DAY_S


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
    given = read_object(document, "policy")
    refuse_unknown(
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
            "steps",
            "promote",
            "traffic",
            "in_flight",
            "standby_s",
            "prepare_s",
            "deadline_s",
        },
    )
    metrics = read_object(given.get("metrics", DEFAULT_DOCUMENT["metrics"]), "metrics")
    if not metrics:
        raise InvalidPolicy("metrics is empty: name at least one metric.")
    segments = read_object(given.get("segments", {}), "segments")
    refuse_unknown(segments, "segments", {"keys", "crossings", "minimum"})
    steps = parse_steps(read_list(given, "steps", ()))
    has_canary = any(step.kind is StepKind.CANARY for step in steps)
    return Policy(
        metrics=tuple(_parse_metric(name, rule) for name, rule in sorted(metrics.items())),
        steps=steps,
        promotes=read_flag(given, "promote", default=has_canary),
        traffic=tuple(_parse_traffic(one) for one in read_list(given, "traffic", ())),
        in_flight=_parse_in_flight(given.get("in_flight")),
        standby_s=_seconds_or_none(given, "standby_s"),
        prepare_s=read_number(given, "prepare_s", 900.0, low=0, high=DAY_S),
        deadline_s=read_number(given, "deadline_s", 14 * DAY_S, low=0, high=MAX_S + 1),
        alpha=read_number(given, "alpha", 0.05, low=0, high=0.5),
        keys=_known_keys(read_strings(segments, "keys", KEYS), "segments.keys"),
        crossings=tuple(_crossing(one) for one in read_list(segments, "crossings", ())),
        minimum=read_count(segments, "minimum", 100),
        block_s=read_number(given, "block_s", 900.0, low=0, high=7 * 86_400),
        min_coverage=read_number(given, "min_coverage", 0.5, low=-1, high=1.000001),
        users_once_per_block=read_flag(given, "users_once_per_block"),
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
    given = read_object(document, where)
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
    shared = {
        "kind", "tolerance", "margin", "overall_margin", "minimum", "modes", "segments", "critical",
    }  # fmt: skip
    refuse_unknown(given, where, shared | own[kind])
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
        budget = 1 - read_number(given, "quantile", 0.99, low=0, high=1, where=where)
        values |= {key: given.get(key, budget) for key in ("tolerance", "margin")}
    if "overall_margin" not in given:
        margin = read_number(values, "margin", 0.0, low=-1, high=1, where=where)
        default = margin if kind is Kind.LATENCY else values["overall_margin"]
        values["overall_margin"] = min(margin, default)
    return values


def _metric_of(name: str, kind: Kind, values: Mapping[str, Any], where: str) -> MetricRule:
    modes = read_strings(values, "modes", MODES, where)
    if unknown := sorted(set(modes) - {*MODES, SCORE}):
        known = ", ".join((*MODES, SCORE))
        raise InvalidPolicy(f"{where}.modes: {unknown[0]!r} must be one of {known}.")
    segments = values.get("segments")
    flags = values.get("flags")
    field_name = str(values.get("field", ""))
    if kind in (Kind.SCORE, Kind.COST) and not field_name:
        raise InvalidPolicy(f"{where}.field is missing: name the field of a row that holds it.")
    low = 0.0 if kind is Kind.LATENCY else -1.0
    limit = values.get("limit_ms")
    return MetricRule(
        name=name,
        kind=kind,
        tolerance=read_number(values, "tolerance", 0.02, low=low, high=1, where=where),
        margin=read_number(values, "margin", 0.05, low=low, high=1, where=where),
        overall_margin=read_number(values, "overall_margin", 0.02, low=low, high=1, where=where),
        minimum=read_count(values, "minimum", 100, where),
        segment_minimum=read_count(values, "segment_minimum", 1, where),
        modes=modes,
        flags=None if flags is None else frozenset(read_strings(values, "flags", (), where)),
        field=field_name,
        quantile=read_number(values, "quantile", 0.99, low=0, high=1, where=where),
        slack=read_number(values, "slack", 1.2, low=0, high=100, where=where),
        limit_ms=None
        if limit is None
        else read_number(values, "limit_ms", 0.0, low=0, high=1e9, where=where),
        segments=None
        if segments is None
        else _known_keys(read_strings(values, "segments", (), where), f"{where}.segments"),
        critical=read_flag(values, "critical", default=True, where=where),
    )


def _parse_discovery(document: Any) -> Discovery | None:
    if document is None or document is False:
        return None
    given = read_object(document, "discovery")
    refuse_unknown(given, "discovery", {"every", "minimum"})
    return Discovery(
        every=read_count(given, "every", 2_000, "discovery"),
        minimum=read_count(given, "minimum", 50, "discovery"),
    )


def _parse_traffic(document: Any) -> SegmentTraffic:
    given = read_object(document, "traffic")
    refuse_unknown(given, "traffic", {"segment", "per_hour", "loss_rate"})
    values = read_object(given.get("segment", {}), "traffic.segment")
    keys = _known_keys(tuple(sorted(values)), "traffic.segment")
    if not all(isinstance(value, str) and value for value in values.values()):
        raise InvalidPolicy(f"traffic.segment={dict(values)!r} must map keys to texts.")
    return SegmentTraffic(
        segment=tuple((key, values[key]) for key in keys),
        per_hour=read_number(given, "per_hour", 0.0, low=0, high=1e12, where="traffic"),
        loss_rate=read_number(given, "loss_rate", 0.03, low=0, high=1, where="traffic"),
    )


def _parse_in_flight(value: Any) -> str | None:
    if value is not None and value not in IN_FLIGHT:
        raise InvalidPolicy(f"in_flight={value!r} must be one of {', '.join(IN_FLIGHT)}.")
    return None if value is None else str(value)


def _seconds_or_none(given: Mapping[str, Any], key: str) -> float | None:
    if given.get(key) is None:
        return None
    return read_number(given, key, 0.0, low=0, high=MAX_S + 1)


def _known_keys(keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    for key in keys:
        is_tag = key.startswith(TAG) and len(key) > len(TAG)
        if key not in (*KEYS, LENGTH_BAND) and not is_tag:
            known = ", ".join((*KEYS, LENGTH_BAND, f"{TAG}NAME"))
            raise InvalidPolicy(f"{where}: {key!r} is no key of segments: use {known}.")
    return keys


def _crossing(value: Any) -> tuple[str, ...]:
    keys = _known_keys(read_strings({"crossings": value}, "crossings", ()), "segments.crossings")
    if len(set(keys)) < 2:
        raise InvalidPolicy(f"segments.crossings: {list(keys)!r} must name two keys or more.")
    return tuple(sorted(set(keys)))
