"""From stored requests and pairs to the rows that recorded traffic has, so that live and replayed are judged alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from controlplane.rollouts.recordings import UNREAD
from controlplane.rollouts.validation import COST

# What is read of a line of the request log, in this order.
LOG_COLUMNS = (
    "request_id", "arm", "version", "outcome", "status", "finished_at", "total_s", "user", "key_id", "tags",
    "prompt", "generation", "prompt_tokens", "completion_tokens", "engine_s",
)  # fmt: skip
CANCELLED = "cancelled"
CANDIDATE = "candidate"


def row_of_log(values: Sequence[Any], *, candidate: str) -> dict[str, Any]:
    """A line of the request log as a row; ``candidate`` is the version on trial.

    A request belongs to the arm that it was assigned to. One of the candidate's that another version had to answer is
    a failure of the candidate: its process died with it. One whose caller left was not answered by anybody's fault.
    """
    line = dict(zip(LOG_COLUMNS, values, strict=True))
    is_candidate = line["arm"] == CANDIDATE
    tags = line["tags"] or {}
    has_failed = line["outcome"] not in ("ok", CANCELLED)
    was_rescued = is_candidate and bool(candidate) and line["version"] != candidate
    return {
        "ts": arrived_at(line["finished_at"], line["total_s"]),
        "request_id": line["request_id"],
        "arm": "candidate" if is_candidate else "incumbent",
        "mode": "canary",
        "pair_id": None,
        "prompt": line["prompt"],
        "response": "",
        "flags": None,
        UNREAD: True,
        "lang": tags.get("lang"),
        "topic": tags.get("topic"),
        "tenant": tags.get("tenant") or line["key_id"] or None,
        "latency_ms": None if line["outcome"] == CANCELLED else line["total_s"] * 1000,
        "user": line["user"] or None,
        "tags": tags,
        "outcome": "error" if has_failed or was_rescued else "ok",
        "generation": line["generation"],
        COST: _cost_of(line),
    }


def _cost_of(line: Mapping[str, Any]) -> float | None:
    """Engine seconds per 1,000 tokens that went in and came out."""
    num_tokens = line["prompt_tokens"] + line["completion_tokens"]
    if line["engine_s"] is None or not num_tokens:
        return None
    return float(1000 * line["engine_s"] / num_tokens)


def arrived_at(finished_at: datetime, total_s: float) -> float:
    """When a request came, in epoch seconds."""
    return finished_at.timestamp() - total_s


def share_at(weights: Sequence[Sequence[int]], generation: int) -> int:
    """Which share the candidate had at ``generation`` of the endpoint, in basis points."""
    share = 0
    for since, canary_bp in weights:
        if since <= generation:
            share = canary_bp
    return share
