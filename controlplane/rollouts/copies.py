"""What the copies of a rollout's requests have come to: how many were compared, what they cost, and how equal answers are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Count

from controlplane.rollouts.models import Rollout
from controlplane.rollouts.pairs import Pair, PairQuerySet
from controlplane.rollouts.policy import SCORE, SHADOW
from inference.queue import Queue, QueueUnavailable

logger = logging.getLogger(__name__)

SELF = "self"
ARMS = (SHADOW, SCORE, SELF)
NUM_WORST = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """One kind of copy: pairs by what is known of them, unobserved ones by reason, and copies that never ran.

    ``skips`` is None while Redis is away. What was dropped on its way is both an unobserved pair and a skipped copy.
    """

    name: str
    compared: int
    failed: int
    unobserved: Mapping[str, int]
    skips: Mapping[str, int] | None
    prompt_tokens: int
    completion_tokens: int
    engine_s: float

    @property
    def num_observed(self) -> int:
        """Pairs that tell something of the candidate."""
        return self.compared + self.failed

    @property
    def coverage(self) -> float | None:
        """The share of pairs that tell something; None without pairs."""
        total = self.num_observed + sum(self.unobserved.values())
        return self.num_observed / total if total else None


@dataclass(frozen=True, slots=True)
class Floor:
    """How often the incumbent's own answers differ when it is asked twice: what no candidate can be better than."""

    different: int
    n: int


@dataclass(frozen=True, slots=True)
class Copies:
    """All that is known of the copies of a rollout."""

    arms: tuple[Arm, ...]
    floor: Floor
    candidate: Floor


def copies_of(rollout: Rollout, queue: Queue) -> Copies:
    """The arms that have copies, the incumbent against itself, and the candidate against the incumbent."""
    pairs = Pair.objects.of_rollout(rollout.key)
    return Copies(
        arms=_arms(pairs, _read_skips(rollout, queue)),
        floor=Floor(*pairs.of_arm(SELF).difference_rate()),
        candidate=Floor(*pairs.of_arm(SHADOW).difference_rate()),
    )


def worst_pairs_of(rollout: Rollout) -> list[Pair]:
    """Pairs that speak most against the candidate: no answer, then flags that the incumbent has not, then the least alike."""
    pairs = Pair.objects.of_rollout(rollout.key).filter(arm__in=(SHADOW, SCORE))
    return list(pairs.disagreeing().worst_first()[:NUM_WORST])


def _arms(pairs: PairQuerySet, skips: Mapping[str, Mapping[str, int]] | None) -> tuple[Arm, ...]:
    counts: dict[str, dict[tuple[str, str], int]] = {}
    grouped = (
        pairs.values("arm", "state", "reason").annotate(n=Count("pk")).order_by("-n", "reason")
    )
    for row in grouped:
        counts.setdefault(row["arm"], {})[row["state"], row["reason"]] = row["n"]
    costs = pairs.costs()
    known = [name for name in ARMS if name in counts or name in (skips or {})]
    return tuple(
        _arm(
            name,
            counts.get(name, {}),
            costs.get(name, {}),
            None if skips is None else skips.get(name, {}),
        )
        for name in known
    )


def _arm(
    name: str,
    counts: Mapping[tuple[str, str], int],
    costs: Mapping[str, Any],
    skips: Mapping[str, int] | None,
) -> Arm:
    def total(state: str) -> int:
        return sum(n for (found, _), n in counts.items() if found == state)

    unobserved = {
        reason or "unknown": n
        for (state, reason), n in counts.items()
        if state == Pair.State.UNOBSERVED
    }
    return Arm(
        name=name,
        compared=total(Pair.State.COMPARED),
        failed=total(Pair.State.FAILED),
        unobserved=unobserved,
        skips=skips,
        prompt_tokens=costs.get("prompt_tokens") or 0,
        completion_tokens=costs.get("completion_tokens") or 0,
        engine_s=costs.get("engine_s") or 0.0,
    )


def _read_skips(rollout: Rollout, queue: Queue) -> dict[str, dict[str, int]] | None:
    try:
        return queue.read_skips(rollout.endpoint.name, rollout.key)
    except QueueUnavailable:
        logger.warning("skipped copies unknown: redis is away rollout=%s", rollout.key)
        return None
