"""Segments of traffic: what they are called, which ones are judged, and who belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Conditions that hold together, sorted by key. The empty segment is all traffic.
Segment = tuple[tuple[str, str], ...]
Mask = NDArray[np.bool_]

OVERALL: Segment = ()
# The value under which the values below the minimum sample of a key are judged together.
OTHER = "(other)"
ABSENT = -1

# Upper ends in characters of the prompt, exclusive.
LENGTH_BANDS = ((200, "under 200"), (1_000, "200-999"), (4_000, "1000-3999"))
LONGEST = "4000 and more"


@dataclass(frozen=True, slots=True)
class Column:
    """One key of all requests: ``names[codes[i]]`` is the value of request i, ABSENT where it has none."""

    codes: NDArray[np.int32]
    names: tuple[str, ...]


Columns = Mapping[str, Column]


@dataclass(frozen=True, slots=True)
class NotCovered:
    """A segment that is not judged on its own, and how little there was of it."""

    segment: Segment
    n: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which segments are judged. Made from covariates alone, before any outcome, and then frozen."""

    judged: tuple[Segment, ...]
    pooled: Mapping[str, frozenset[str]]
    not_covered: tuple[NotCovered, ...]


def column_of(values: Iterable[str | None]) -> Column:
    """The column with these values; names are sorted, so that rows in another order mean the same."""
    listed = list(values)
    names = tuple(sorted({value for value in listed if value is not None}))
    code = {name: number for number, name in enumerate(names)}
    codes = (ABSENT if value is None else code[value] for value in listed)
    return Column(np.fromiter(codes, dtype=np.int32, count=len(listed)), names)


def length_band(num_chars: int) -> str:
    """The band of a prompt's length."""
    return next((name for end, name in LENGTH_BANDS if num_chars < end), LONGEST)


def plan_segments(
    columns: Columns, *, keys: Sequence[str], crossings: Sequence[Sequence[str]], minimum: int
) -> Plan:
    """All traffic, each value of each key, and each crossing that is named, where ``minimum`` requests support it.

    Smaller values of a key are pooled into OTHER; they and smaller crossings are listed as not covered. OTHER is
    judged if it has the minimum itself.
    """
    judged: list[Segment] = [OVERALL]
    not_covered: list[NotCovered] = []
    pooled: dict[str, frozenset[str]] = {}
    for key in sorted({key for key in keys if key in columns}):
        sizes = _sizes(columns[key])
        small = [name for name, n in sizes.items() if n < minimum]
        judged += [((key, name),) for name in sizes if name not in small]
        not_covered += [NotCovered(((key, name),), sizes[name]) for name in small]
        pooled[key] = frozenset(small)
        num_pooled = sum(sizes[name] for name in small)
        if small and num_pooled >= minimum:
            judged.append(((key, OTHER),))
    for crossing in sorted({tuple(sorted(crossing)) for crossing in crossings}):
        for segment, n in _crossed(columns, crossing).items():
            if n >= minimum:
                judged.append(segment)
            else:
                not_covered.append(NotCovered(segment, n))
    return Plan(tuple(judged), pooled, tuple(not_covered))


def members(segment: Segment, columns: Columns, plan: Plan, num_requests: int) -> Mask:
    """Which requests belong to ``segment``."""
    mask = np.ones(num_requests, dtype=np.bool_)
    for key, value in segment:
        mask &= _has(columns.get(key), value, plan.pooled.get(key, frozenset()), num_requests)
    return mask


def describe(segment: Segment) -> str:
    """``lang=hi, topic=refund``; "all traffic" for the empty segment."""
    return ", ".join(f"{key}={value}" for key, value in segment) or "all traffic"


def _sizes(column: Column) -> dict[str, int]:
    counts = np.bincount(column.codes[column.codes >= 0], minlength=len(column.names))
    return {name: int(n) for name, n in zip(column.names, counts, strict=True) if n}


def _crossed(columns: Columns, crossing: Sequence[str]) -> dict[Segment, int]:
    """Each combination of values that occurs, with its size."""
    if not all(key in columns for key in crossing):
        return {}
    codes = np.stack([columns[key].codes for key in crossing])  # [num_keys, num_requests]
    present = codes[:, (codes >= 0).all(axis=0)]
    combinations, counts = np.unique(present, axis=1, return_counts=True)
    return {
        tuple(
            (key, columns[key].names[code]) for key, code in zip(crossing, combination, strict=True)
        ): int(n)
        for combination, n in zip(combinations.T, counts, strict=True)
    }


def _has(column: Column | None, value: str, pooled: frozenset[str], num_requests: int) -> Mask:
    if column is None:
        return np.zeros(num_requests, dtype=np.bool_)
    wanted = pooled if value == OTHER else {value}
    codes = [code for code, name in enumerate(column.names) if name in wanted]
    return np.isin(column.codes, codes)
