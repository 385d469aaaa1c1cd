"""Recorded traffic: one JSON object per line, into columns of requests. The order of lines means nothing."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import DomainError
from controlplane.rollouts.observations import Recording
from controlplane.rollouts.policy import LENGTH_BAND, TAG, Kind, MetricRule, Policy
from drift.matching import ABSENT, Traffic
from drift.segments import column_of, length_band

Floats = NDArray[np.float64]

ARMS = ("incumbent", "candidate")
MODES = ("shadow", "canary", "live", "golden")
# After dispatch: failures of the version that should have answered. Before dispatch: never observed.
FAILED = frozenset({"error", "timeout"})
DROPPED = "dropped"
OUTCOMES = frozenset({"ok", DROPPED}) | FAILED
# Of a live row: no classifier has seen the text, so flags are not known.
UNREAD = "is_unread"


class MalformedRow(DomainError):
    """A line that is no row of recorded traffic, told by its number."""

    code = "malformed_row"
    status = HTTPStatus.UNPROCESSABLE_ENTITY

    def __init__(self, line: int, told: str) -> None:
        super().__init__(f"line {line}: {told}")
        self.line = line
        self.told = told


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a file that could be read, and what was wrong with the others."""

    rows: tuple[Mapping[str, Any], ...]
    malformed: tuple[MalformedRow, ...]


def read_rows(lines: Iterable[str], *, is_strict: bool) -> Rows:
    """Parse and check each line; empty ones are passed over.

    Raises:
        MalformedRow: a line is malformed, and ``is_strict``.
    """
    rows, malformed = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_read_row(line, number))
        except MalformedRow as error:
            if is_strict:
                raise
            malformed.append(error)
    return Rows(tuple(rows), tuple(malformed))


def record_rows(rows: Iterable[Mapping[str, Any]], policy: Policy, experiment: str) -> Recording:
    """The columns of ``rows``: shadow, canary and live requests, each once, ordered by time and identity.

    A half of a shadow pair that the incumbent answered as live traffic belongs to its pair. Copies that were dropped
    before dispatch vanish, which leaves their incumbent request without a partner.
    """
    kept = _each_once(row for row in rows if row["mode"] != "golden" and _outcome(row) != DROPPED)
    keys = sorted({*policy.keys, *(key for crossing in policy.crossings for key in crossing)})
    columns = {key: column_of(label_of(row, key) for row in kept) for key in keys}
    failed = np.array([_has_failed(row) for row in kept], dtype=np.bool_)
    return Recording(
        traffic=_traffic(kept, policy, experiment),
        columns={key: column for key, column in columns.items() if column.names},
        losses={
            rule.name: _losses(kept, rule, failed)
            for rule in policy.metrics
            if rule.kind is not Kind.LATENCY
        },
        latency_ms=_numbers(kept, "latency_ms"),
        failed=failed,
    )


def _read_row(line: str, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedRow(number, f"is not JSON ({error}).") from error
    if not isinstance(row, dict):
        raise MalformedRow(number, "is not a JSON object.")
    for key, (is_valid, wanted) in FIELDS.items():
        if not is_valid(row.get(key)):
            shown = repr(row[key])[:60] if key in row else "missing"
            raise MalformedRow(number, f"{key} is {shown}; it must be {wanted}.")
    return row


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_optional_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_identity(value: Any) -> bool:
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def _is_amount(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < 1e15


def _is_optional_amount(value: Any) -> bool:
    return value is None or _is_amount(value)


def _is_text_list(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _is_tags(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(_is_optional_text(v) for v in value.values())
    )


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ts": (_is_amount, "a time in epoch seconds"),
    "request_id": (_is_text, "a text"),
    "arm": (lambda value: value in ARMS, f"one of {', '.join(ARMS)}"),
    "mode": (lambda value: value in MODES, f"one of {', '.join(MODES)}"),
    "pair_id": (_is_identity, "a text or null"),
    "prompt": (_is_optional_text, "a text or null"),
    "response": (_is_optional_text, "a text or null"),
    "flags": (_is_text_list, "a list of texts, or absent"),
    "lang": (_is_optional_text, "a text or null"),
    "topic": (_is_optional_text, "a text or null"),
    "tenant": (_is_optional_text, "a text or null"),
    "latency_ms": (_is_optional_amount, "a number of milliseconds or null"),
    "user": (_is_identity, "a text, or absent"),
    "classifier": (_is_optional_text, "a text, or absent"),
    "tags": (_is_tags, "an object of texts, or absent"),
    "outcome": (
        lambda value: value is None or (isinstance(value, str) and value in OUTCOMES),
        f"one of {', '.join(sorted(OUTCOMES))}, or absent",
    ),
}


def _each_once(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """In canonical order; a request that was delivered twice counts once."""
    once: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for row in rows:
        identity = (row["request_id"], row["arm"], row["mode"])
        other = once.get(identity)
        if other is None or _canonical(row) < _canonical(other):
            once[identity] = row
    return sorted(
        once.values(), key=lambda row: (row["ts"], row["request_id"], row["arm"], row["mode"])
    )


def _canonical(row: Mapping[str, Any]) -> tuple[float, str]:
    return row["ts"], json.dumps(row, sort_keys=True)


def _traffic(rows: Sequence[Mapping[str, Any]], policy: Policy, experiment: str) -> Traffic:
    pairs = [_pair(row) for row in rows]
    is_shadow = [
        row["mode"] == "shadow" or pair is not None for row, pair in zip(rows, pairs, strict=True)
    ]
    return Traffic(
        at=np.array([row["ts"] for row in rows], dtype=np.float64),
        is_candidate=np.array([row["arm"] == "candidate" for row in rows], dtype=np.bool_),
        is_shadow=np.array(is_shadow, dtype=np.bool_),
        pair=_codes(pairs),
        prompt=_codes(_normalise(row.get("prompt")) for row in rows),
        user=_codes(None if row.get("user") is None else str(row["user"]) for row in rows),
        scorer=_codes(row.get("classifier") for row in rows),
        draw=np.array([_draw(experiment, row) for row in rows], dtype=np.uint64),
        block_s=policy.block_s,
    )


def _pair(row: Mapping[str, Any]) -> str | None:
    """The pair that a row is half of; a copy without a name for it has the request's."""
    pair = row.get("pair_id")
    if row["mode"] == "shadow":
        return str(row["request_id"] if pair is None else pair)
    return str(pair) if row["mode"] == "live" and pair is not None else None


def _codes(values: Iterable[str | None]) -> NDArray[np.int64]:
    """A number per distinct text, in order of appearance."""
    numbers: dict[str, int] = {}
    listed = [
        ABSENT if value is None else numbers.setdefault(value, len(numbers)) for value in values
    ]
    return np.array(listed, dtype=np.int64)


def _normalise(prompt: str | None) -> str | None:
    """Prompts that differ in case, spacing or compatibility forms of characters are repeats."""
    if prompt is None:
        return None
    text = prompt if prompt.isascii() else unicodedata.normalize("NFKC", prompt)
    return " ".join(text.casefold().split())


def _draw(experiment: str, row: Mapping[str, Any]) -> int:
    text = f"{experiment}\n{row['request_id']}\n{row['arm']}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def label_of(row: Mapping[str, Any], key: str) -> str | None:
    if key == LENGTH_BAND and row.get(LENGTH_BAND) is None:
        prompt = row.get("prompt")
        return None if prompt is None else length_band(len(prompt))
    if key.startswith(TAG):
        value = (row.get("tags") or {}).get(key.removeprefix(TAG))
    else:
        value = row.get(key)
    return value if isinstance(value, str) and value else None


def _outcome(row: Mapping[str, Any]) -> str:
    return row.get("outcome") or "ok"


def _has_failed(row: Mapping[str, Any]) -> bool:
    """No answer after dispatch. Where texts are not stored, the labels show that there was an answer."""
    return _outcome(row) in FAILED or (row.get("response") is None and row.get("flags") is None)


def _losses(
    rows: Sequence[Mapping[str, Any]], rule: MetricRule, failed: NDArray[np.bool_]
) -> Floats:
    if rule.kind is Kind.FLAGS:
        wanted = rule.flags
        flagged = (
            any(wanted is None or flag in wanted for flag in row.get("flags") or ()) for row in rows
        )
        losses = np.where(failed, 1.0, np.fromiter(flagged, dtype=np.float64, count=len(rows)))
        # Where nobody read the answer, its failures alone would be half of the measure.
        unread = (bool(wanted != frozenset() and row.get(UNREAD)) for row in rows)
        return np.where(np.fromiter(unread, dtype=np.bool_, count=len(rows)), np.nan, losses)
    values = _numbers(rows, rule.field)
    if rule.kind is Kind.COST:
        return np.where(failed, np.nan, values)
    return np.where(failed, 1.0, np.where(values <= 1, values, np.nan))


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> Floats:
    values: Iterable[Any] = (row.get(key) for row in rows)
    numbers = (float(value) if _is_amount(value) else math.nan for value in values)
    return np.fromiter(numbers, dtype=np.float64, count=len(rows))
