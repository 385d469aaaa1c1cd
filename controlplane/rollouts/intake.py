"""From the halves in the stream ``answers`` to pairs: joined, classified by one classifier, stored, and then forgotten.

The stream is the state: every call reads what is left in it. A pair is committed before its halves are deleted, and
stored once by its request and arm, so that a call may be repeated, run beside another, or end anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache

from controlplane.monitoring.models import FlaggedTerm
from controlplane.rollouts import pairing
from controlplane.rollouts.pairing import Finding
from controlplane.rollouts.pairs import Pair
from drift.classifiers import ResponseClassifier, RulesV1
from inference.protocol import (
    COPY_RUN_S,
    COPY_WAIT_S,
    GOLDEN,
    LIVE,
    SCORE,
    Answer,
    GenerateRequest,
)
from inference.queue import Half, Queue

logger = logging.getLogger(__name__)

BATCH = 200
NO_INCUMBENT, NOTHING_TO_SCORE = "no_incumbent", "nothing_to_score"
# A copy may be answered so long before its request, which has as much time.
ORPHANED_AFTER_S = COPY_RUN_S + COPY_WAIT_S


@dataclass(slots=True)
class Halves:
    """All halves of one request, and the ids to delete those of each arm by."""

    by_arm: dict[str, Answer] = field(default_factory=dict)
    entry_ids: dict[str, list[str]] = field(default_factory=dict)

    def add(self, half: Half) -> None:
        """One more; of two of the same arm the first counts."""
        self.by_arm.setdefault(half.answer.arm, half.answer)
        self.entry_ids.setdefault(half.answer.arm, []).append(half.entry_id)


def intake_answers(*, queue: Queue, now: datetime, scorer: str = "") -> int:
    """Store every pair whose halves are there, or are given up; returns how many were.

    With a ``scorer``'s name the halves of compared pairs stay in the stream for it.

    Raises:
        ClassifierBroken: the classifier fails its own examples; the halves wait.
        QueueUnavailable: Redis cannot be reached.
    """
    everything = collect(queue)
    if not everything:
        return 0
    join = _Join(queue, load_classifier(), now, scorer, _stored(everything))
    for halves in everything.values():
        join.resolve(halves)
    Pair.objects.bulk_create(join.pairs, ignore_conflicts=True, batch_size=BATCH)
    queue.delete_answers(join.done)
    return len(join.pairs)


def collect(queue: Queue) -> dict[str, Halves]:
    """All halves in the stream, by request; golden replays are not ours."""
    everything: dict[str, Halves] = {}
    for half in queue.read_answers():
        if half.answer.arm != GOLDEN:
            everything.setdefault(half.answer.copy_of, Halves()).add(half)
    return everything


def load_classifier() -> ResponseClassifier:
    """The rules with the terms of today, once they have passed their own examples.

    Raises:
        ClassifierBroken: they have not.
    """
    return _checked_rules(FlaggedTerm.objects.active_terms())


@lru_cache(maxsize=2)
def _checked_rules(terms: tuple[str, ...]) -> ResponseClassifier:
    rules = RulesV1(terms)
    rules.self_test().check()
    return rules


def _stored(everything: Mapping[str, Halves]) -> dict[tuple[str, str], str]:
    """Of pairs that were stored before, where their scoring stands."""
    names = list(everything)
    stored: dict[tuple[str, str], str] = {}
    for start in range(0, len(names), BATCH):
        rows = Pair.objects.filter(request_id__in=names[start : start + BATCH])
        for request_id, arm, scoring in rows.values_list("request_id", "arm", "scoring"):
            stored[request_id, arm] = scoring
    return stored


class _Join:
    """What one call makes of the halves: the pairs that are new, and the entries that nobody needs any more."""

    def __init__(
        self,
        queue: Queue,
        classifier: ResponseClassifier,
        now: datetime,
        scorer: str,
        stored: Mapping[tuple[str, str], str],
    ) -> None:
        self._queue = queue
        self._classifier = classifier
        self._now_s = now.timestamp()
        self._scorer = scorer
        self._stored = stored
        self.pairs: list[Pair] = []
        self.done: list[str] = []

    def resolve(self, halves: Halves) -> None:
        """Make the pairs of one request that can be made now."""
        incumbent = halves.by_arm.get(LIVE)
        if incumbent is None:
            self._drop_orphans(halves)
            return
        request = GenerateRequest.from_json(incumbent.request)
        scorings = [self._scoring_of(arm, incumbent, request, halves) for arm in incumbent.awaits]
        for arm, scoring in zip(incumbent.awaits, scorings, strict=True):
            if scoring is not None and scoring != Pair.Scoring.WAITING:
                self.done += halves.entry_ids.get(arm, [])
        if all(each is not None and each != Pair.Scoring.WAITING for each in scorings):
            self.done += halves.entry_ids[LIVE]

    def _scoring_of(
        self, arm: str, incumbent: Answer, request: GenerateRequest, halves: Halves
    ) -> str | None:
        """Where the scoring of the pair stands; None while there is no pair yet."""
        if (scoring := self._stored.get((request.id, arm))) is not None:
            return scoring
        candidate = halves.by_arm.get(arm)
        finding = self._find(arm, incumbent, candidate, request)
        if finding is None:
            return None
        pair = self._pair(arm, finding, incumbent, candidate, request)
        self.pairs.append(pair)
        return pair.scoring

    def _find(
        self, arm: str, incumbent: Answer, candidate: Answer | None, request: GenerateRequest
    ) -> Finding | None:
        """What the halves tell so far; None while the copy's may still come."""
        if candidate is not None:
            return pairing.judge_halves(incumbent, candidate)
        if arm == SCORE and (reason := self._ask_for_score(incumbent, request)):
            return Finding(pairing.UNOBSERVED, reason)
        if self._now_s < pairing.gives_up_at(incumbent, request):
            return None
        return pairing.judge_alone(incumbent, self._queue.give_up_copy(request.id, arm))

    def _ask_for_score(self, incumbent: Answer, request: GenerateRequest) -> str:
        """Have the candidate score the answer, once; why that cannot be, or nothing."""
        if not (incumbent.is_ok and incumbent.text):
            return NOTHING_TO_SCORE
        route = self._queue.read_route(incumbent.endpoint)
        version = route.candidate if route is not None else ""
        body = replace(request, score_text=incumbent.text)
        reply = self._queue.enqueue_copy(body, version, arm=SCORE, rollout=incumbent.rollout)
        return "" if reply in ("queued", "repeated") else reply

    def _pair(
        self,
        arm: str,
        finding: Finding,
        incumbent: Answer,
        candidate: Answer | None,
        request: GenerateRequest,
    ) -> Pair:
        pair = Pair(
            rollout=incumbent.rollout,
            request_id=request.id,
            arm=arm,
            endpoint=incumbent.endpoint,
            at=datetime.fromtimestamp(incumbent.at, tz=UTC),
            state=finding.state,
            reason=finding.reason[:64],
            segments=_without_nul(pairing.segments_of(request)),
            user=(request.user or "").replace("\x00", "")[:512],
            prompt_digest=pairing.digest(incumbent.rollout, request),
            classifier=f"{self._classifier.name}/{self._classifier.version}",
        )
        self._describe(pair, "incumbent", incumbent, request)
        if candidate is not None and finding.state != pairing.UNOBSERVED:
            self._describe(pair, "candidate", candidate, request)
            _compare(pair, incumbent, candidate)
        self._prepare_scoring(pair)
        if incumbent.store_texts:
            _add_texts(pair, incumbent, candidate, request)
        return pair

    def _describe(self, pair: Pair, who: str, half: Answer, request: GenerateRequest) -> None:
        """Put what is known of one half into the columns of ``who``."""
        flags = frozenset[str]()
        if half.is_ok and half.arm != SCORE:
            asked = pairing.question(request)
            flags = self._classifier.classify(asked, half.text, half.finish_reason)
        values = {
            "": half.version[:80],
            "_fingerprint": half.fingerprint[:128],
            "_outcome": half.outcome[:64],
            "_finish": half.finish_reason[:16],
            "_flags": sorted(flags),
            "_tokens": half.completion_tokens,
            "_engine_s": half.engine_s,
            "_total_s": half.total_s,
        }
        for name, value in values.items():
            setattr(pair, who + name, value)
        pair.prompt_tokens = max(pair.prompt_tokens, half.prompt_tokens)

    def _prepare_scoring(self, pair: Pair) -> None:
        """Of two answers that are the same neither is better, and nobody need be asked."""
        is_comparable = pair.state == pairing.COMPARED and pair.incumbent_outcome == "ok"
        if not self._scorer or not is_comparable or pair.arm == SCORE:
            return
        pair.scoring = Pair.Scoring.WAITING if pair.differs else Pair.Scoring.DONE
        if not pair.differs:
            pair.scorer, pair.score = self._scorer[:200], 0.0

    def _drop_orphans(self, halves: Halves) -> None:
        """Copies whose request never told what came of it: its gateway died, or had too many to keep."""
        for arm, answer in halves.by_arm.items():
            if self._now_s >= answer.at + ORPHANED_AFTER_S:
                self._queue.count_skip(answer.endpoint, answer.rollout, arm, NO_INCUMBENT)
                self.done += halves.entry_ids[arm]


def _compare(pair: Pair, incumbent: Answer, candidate: Answer) -> None:
    if (score := candidate.score) is not None and score.logprobs:
        pair.mean_logprob = sum(score.logprobs) / len(score.logprobs)
        pair.agreement = score.num_agreed / len(score.logprobs)
    elif pair.arm != SCORE:
        pair.differs = pairing.differ(incumbent, candidate)
        if incumbent.is_ok and candidate.is_ok:
            pair.similarity = pairing.similarity(incumbent.text, candidate.text)


def _add_texts(
    pair: Pair, incumbent: Answer, candidate: Answer | None, request: GenerateRequest
) -> None:
    pair.prompt = _storable(pairing.prompt_text(request))
    pair.incumbent_text = _storable(incumbent.text)
    if candidate is not None and pair.arm != SCORE and not candidate.dropped:
        pair.candidate_text = _storable(candidate.text)


def _without_nul(segments: Mapping[str, str]) -> dict[str, str]:
    return {_storable(key): _storable(value) for key, value in segments.items()}


def _storable(text: str) -> str:
    # PostgreSQL has no NUL in text.
    return text.replace("\x00", "")
