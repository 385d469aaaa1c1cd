"""Having a scorer look at the pairs that wait for one, while their texts are still there. Nothing waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import datetime, timedelta

from controlplane.monitoring.services import Retention
from controlplane.rollouts import pairing
from controlplane.rollouts.intake import Halves, collect
from controlplane.rollouts.pairs import Pair
from controlplane.rollouts.scorers import Scorer, ScorerFailed, ask
from inference.protocol import LIVE, GenerateRequest
from inference.queue import Queue
from inference.queue.copies import ANSWERS_TTL_S

logger = logging.getLogger(__name__)

BATCH = 200
MAX_BATCHES = 200
BUDGET_S = 8.0  # of one call; what is left is found by the next


def score_pairs(*, queue: Queue, scorer: Scorer, now: datetime) -> int:
    """Ask ``scorer`` about waiting pairs until its time is up; returns how many have a score now.

    A pair that it fails on is told to have failed and is not tried again, as is one whose texts are gone. Its halves are
    left for the next intake, which deletes them.
    """
    too_old = now - timedelta(seconds=ANSWERS_TTL_S)
    Pair.objects.waiting_for_score().filter(at__lt=too_old).update(scoring=Pair.Scoring.FAILED)
    waiting = list(Pair.objects.waiting_for_score().order_by("at")[:BATCH])
    if not waiting:
        return 0
    everything = collect(queue)
    num_scored = num_failed = 0
    for pair in _within(BUDGET_S, waiting):
        score = _score(pair, everything.get(pair.request_id), scorer)
        num_scored += score is not None
        num_failed += score is None
        state = Pair.Scoring.FAILED if score is None else Pair.Scoring.DONE
        Pair.objects.filter(pk=pair.pk, scoring=Pair.Scoring.WAITING).update(
            scoring=state, scorer=scorer.name[:200], score=score
        )
    if num_failed:
        logger.warning("scorer failed scorer=%s num=%d", scorer.name, num_failed)
    return num_scored


def expire_pairs(*, retention: Retention, now: datetime) -> int:
    """Delete pairs, and blank texts, that are older than they may be, in small transactions; returns how many went."""
    num_rows = 0
    for _ in range(MAX_BATCHES):
        ids = list(
            Pair.objects.filter(at__lt=now - retention.rows).values_list("pk", flat=True)[:BATCH]
        )
        if not ids:
            break
        num_rows += Pair.objects.filter(pk__in=ids).delete()[0]
    old_texts = Pair.objects.filter(at__lt=now - retention.texts, prompt__isnull=False)
    for _ in range(MAX_BATCHES):
        ids = list(old_texts.values_list("pk", flat=True)[:BATCH])
        if not ids:
            break
        blank = dict.fromkeys(("prompt", "incumbent_text", "candidate_text"))
        Pair.objects.filter(pk__in=ids).update(**blank)
    return num_rows


def _within(budget_s: float, pairs: list[Pair]) -> Iterator[Pair]:
    until = time.monotonic() + budget_s
    for pair in pairs:
        if time.monotonic() >= until:
            return
        yield pair


def _score(pair: Pair, halves: Halves | None, scorer: Scorer) -> float | None:
    """None where the scorer, or a half, is missing."""
    incumbent = halves.by_arm.get(LIVE) if halves else None
    candidate = halves.by_arm.get(pair.arm) if halves else None
    if incumbent is None or candidate is None:
        return None
    try:
        return ask(
            scorer,
            pair_id=str(pair),
            prompt=pairing.prompt_text(GenerateRequest.from_json(incumbent.request)),
            incumbent=incumbent.text,
            candidate=candidate.text,
        )
    except ScorerFailed as error:
        logger.debug("pair not scored pair=%s error=%s", pair, error)
        return None
