"""From stored pairs to rows of both arms, as recorded traffic has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from controlplane.rollouts.pairs import Pair
from controlplane.rollouts.policy import SCORE, SHADOW
from controlplane.rollouts.validation import DISAGREEMENT, JUDGED_WORSE

CHUNK = 500

Row = dict[str, Any]


@dataclass(slots=True)
class PairRows:
    """Halves of pairs: of answers, and of answers that were only scored."""

    shadow: list[Row] = field(default_factory=list)
    score: list[Row] = field(default_factory=list)


def read_pair_rows(rollout: str, starts_at: datetime, ends_at: datetime) -> PairRows:
    """The pairs of a rollout that were dispatched in a span of time; of each prompt the first alone.

    A pair of which nothing is known has its incumbent's half alone, which is what lowers coverage.
    """
    pairs = (
        Pair.objects.of_rollout(rollout)
        .filter(at__gte=starts_at, at__lt=ends_at, arm__in=(SHADOW, SCORE))
        .order_by("at", "request_id", "arm")
    )
    found = list(pairs.defer("prompt", "incumbent_text", "candidate_text"))
    known = _met_before(rollout, starts_at, found)
    rows = PairRows()
    for pair in found:
        question = (pair.arm, pair.prompt_digest)
        if question in known:
            continue
        if pair.state != Pair.State.UNOBSERVED:
            known.add(question)
        side = rows.score if pair.arm == SCORE else rows.shadow
        side += _halves(pair)
    return rows


def _met_before(rollout: str, starts_at: datetime, pairs: list[Pair]) -> set[tuple[str, str]]:
    """Prompts that were compared before: greedy answers to a repeat are no second observation."""
    digests = sorted({pair.prompt_digest for pair in pairs})
    earlier = Pair.objects.of_rollout(rollout).observed().filter(at__lt=starts_at)
    known: set[tuple[str, str]] = set()
    for start in range(0, len(digests), CHUNK):
        chunk = earlier.filter(prompt_digest__in=digests[start : start + CHUNK])
        known.update(chunk.values_list("arm", "prompt_digest").distinct())
    return known


def _halves(pair: Pair) -> list[Row]:
    incumbent = _half(pair, "incumbent", pair.incumbent_outcome == "ok", pair.incumbent_flags)
    incumbent |= {DISAGREEMENT: 0.0, JUDGED_WORSE: 0.5 if pair.score is not None else None}
    if pair.state == Pair.State.UNOBSERVED:
        return [incumbent]
    is_ok = pair.state == Pair.State.COMPARED
    candidate = _half(pair, "candidate", is_ok, pair.candidate_flags)
    candidate |= {
        DISAGREEMENT: None if pair.agreement is None else 1 - pair.agreement,
        JUDGED_WORSE: None if pair.score is None else (1 - pair.score) / 2,
    }
    return [incumbent, candidate]


def _half(pair: Pair, arm: str, is_ok: bool, flags: list[str]) -> Row:
    labels = {key: value for key, value in pair.segments.items() if not key.startswith("tags.")}
    tags = {
        key.removeprefix("tags."): value
        for key, value in pair.segments.items()
        if key.startswith("tags.")
    }
    return {
        **labels,
        "tags": tags,
        "ts": pair.at.timestamp(),
        "request_id": pair.request_id,
        "arm": arm,
        "mode": SHADOW,
        "pair_id": pair.request_id,
        "prompt": pair.prompt_digest,
        "response": "",
        "flags": flags,
        "classifier": pair.classifier or None,
        "user": pair.user or None,
        "latency_ms": None,
        "outcome": "ok" if is_ok else "error",
    }
