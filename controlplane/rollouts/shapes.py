"""Segments, plans, limits, counts and evidence as JSON that rows hold, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from controlplane.rollouts.gates import Memory, Stream
from drift.eprocess import Counts
from drift.latency import Limit
from drift.segments import NotCovered, Plan, Segment

Limits = Mapping[tuple[str, Segment], Limit]


def segment_to_text(segment: Segment) -> str:
    """One text per segment; all traffic is ``[]``."""
    return json.dumps(segment, ensure_ascii=False, separators=(",", ":"))


def segment_from_text(text: str) -> Segment:
    """The segment of ``segment_to_text``."""
    return _segment(json.loads(text))


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A frozen plan."""
    return {
        "judged": [segment_to_text(segment) for segment in plan.judged],
        "pooled": {key: sorted(values) for key, values in plan.pooled.items()},
        "not_covered": [[segment_to_text(each.segment), each.n] for each in plan.not_covered],
    }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan of ``plan_to_json``."""
    return Plan(
        judged=tuple(segment_from_text(text) for text in data["judged"]),
        pooled={key: frozenset(values) for key, values in data["pooled"].items()},
        not_covered=tuple(
            NotCovered(segment_from_text(text), n) for text, n in data["not_covered"]
        ),
    )


def limits_to_json(limits: Limits) -> list[list[Any]]:
    """Limits of latency by metric and segment."""
    return [
        [metric, segment_to_text(segment), limit.limit_ms, limit.quantile, limit.bound_ms, limit.n]
        for (metric, segment), limit in sorted(limits.items())
    ]


def limits_from_json(data: list[list[Any]]) -> dict[tuple[str, Segment], Limit]:
    """The limits of ``limits_to_json``."""
    return {(metric, segment_from_text(text)): Limit(*numbers) for metric, text, *numbers in data}


def counts_to_json(counts: Counts) -> dict[str, int]:
    """The cells of a histogram that are not empty."""
    return {str(cell): int(counts[cell]) for cell in np.flatnonzero(counts)}


def counts_from_json(data: Mapping[str, int], num_cells: int) -> Counts:
    """The histogram of ``counts_to_json``. [num_cells]"""
    counts = np.zeros(num_cells, dtype=np.int64)
    for cell, n in data.items():
        counts[int(cell)] = n
    return counts


def memory_to_json(memory: Memory) -> dict[str, Any]:
    """What has been shown so far."""
    return {
        "harm": _streams_to_json(memory.harm),
        "safe": _streams_to_json(memory.safe),
        "rollback": memory.rollback,
        "named": [[metric, segment_to_text(segment)] for metric, segment in sorted(memory.named)],
    }


def memory_from_json(data: Mapping[str, Any]) -> Memory:
    """The memory of ``memory_to_json``; of nothing at all an empty one."""
    if not data:
        return Memory()
    return Memory(
        harm=_streams_from_json(data["harm"]),
        safe=_streams_from_json(data["safe"]),
        rollback=data["rollback"],
        named=frozenset((metric, segment_from_text(text)) for metric, text in data["named"]),
    )


def _streams_to_json(values: Mapping[Stream, float]) -> list[list[Any]]:
    return [
        [metric, segment_to_text(segment), value]
        for (metric, segment), value in sorted(values.items())
    ]


def _streams_from_json(data: list[list[Any]]) -> dict[Stream, float]:
    return {(metric, segment_from_text(text)): value for metric, text, value in data}


def _segment(pairs: list[list[str]]) -> Segment:
    return tuple((key, value) for key, value in pairs)
