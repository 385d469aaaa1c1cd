"""What two answers to the same request were like: one row per request and arm. Texts only where they may be stored."""

from __future__ import annotations

from typing import Any, Self

from django.db import models
from django.db.models import Case, Count, F, IntegerField, Q, Sum, When


class PairQuerySet(models.QuerySet["Pair"]):
    """Pairs, as evidence, lists and bills need them."""

    def of_rollout(self, key: str) -> Self:
        """The pairs of one rollout."""
        return self.filter(rollout=key)

    def of_arm(self, arm: str) -> Self:
        """``shadow``, ``self`` or ``score``."""
        return self.filter(arm=arm)

    def observed(self) -> Self:
        """Those that tell something of the candidate: it answered, or failed."""
        return self.exclude(state=Pair.State.UNOBSERVED)

    def disagreeing(self) -> Self:
        """Those where the two answers have other flags, or one is none."""
        return self.observed().filter(~Q(incumbent_flags=F("candidate_flags")) | Q(state="failed"))

    def worst_first(self) -> Self:
        """What speaks most against the candidate first: no answer, flags that the incumbent has not, flags, then the rest.

        Among equals those that a scorer liked least come first, and then those that are least alike.
        """
        rank = Case(
            When(state="failed", then=0),
            When(~Q(candidate_flags=[]) & Q(incumbent_flags=[]), then=1),
            When(~Q(candidate_flags=[]), then=2),
            default=3,
            output_field=IntegerField(),
        )
        return self.order_by(
            rank, F("score").asc(nulls_last=True), F("similarity").asc(nulls_last=True), "-pk"
        )

    def waiting_for_score(self) -> Self:
        """Those whose texts a scorer has not seen yet."""
        return self.filter(scoring=Pair.Scoring.WAITING)

    def difference_rate(self) -> tuple[int, int]:
        """How many of the compared ones differ at all, and how many there are."""
        compared = self.filter(state=Pair.State.COMPARED)
        counts = compared.aggregate(n=Count("pk"), different=Count("pk", filter=Q(differs=True)))
        return counts["different"], counts["n"]

    def costs(self) -> dict[str, dict[str, Any]]:
        """By arm: copies that ran, their tokens, and the engine's seconds. No key is billed for them."""
        rows = (
            self.observed()
            .values("arm")
            .annotate(
                copies=Count("pk"),
                prompt_tokens=Sum("prompt_tokens"),
                completion_tokens=Sum("candidate_tokens"),
                engine_s=Sum("candidate_engine_s"),
            )
        )
        return {row["arm"]: dict(row) for row in rows.order_by("arm")}


class Pair(models.Model):
    """A request that a second version answered, or scored, for comparison.

    ``compared``: both have an answer. ``failed``: the copy was dispatched, and ``reason`` is the code of what came of
    it. ``unobserved``: nothing is known of the candidate, for ``reason``. Names, not foreign keys, as in the request log.

    ``similarity`` describes and decides nothing: two good answers differ. ``score`` is a scorer's, from -1, the incumbent's
    answer is better, to 1. Of an answer that was only scored there are ``mean_logprob`` and ``agreement``, the share of its
    tokens that were the candidate's own first choice. ``prompt_digest`` tells repeats without keeping the prompt.
    """

    class State(models.TextChoices):
        """What is known of the candidate."""

        COMPARED = "compared", "both answered"
        FAILED = "failed", "the candidate has no answer"
        UNOBSERVED = "unobserved", "the copy was not run"

    class Scoring(models.TextChoices):
        """Where a scorer is with it."""

        NONE = "", "no scorer"
        WAITING = "waiting", "to be scored"
        DONE = "done", "scored"
        FAILED = "failed", "the scorer failed"

    rollout = models.CharField(max_length=32)
    request_id = models.CharField(max_length=64)
    arm = models.CharField(max_length=16)
    endpoint = models.CharField(max_length=64)
    at = models.DateTimeField()
    state = models.CharField(max_length=16, choices=State)
    reason = models.CharField(max_length=64, blank=True, default="")
    segments = models.JSONField(default=dict, blank=True)
    user = models.CharField(max_length=512, blank=True, default="")
    prompt_digest = models.CharField(max_length=32)
    prompt_tokens = models.PositiveIntegerField(default=0)
    classifier = models.CharField(max_length=64, blank=True, default="")

    incumbent = models.CharField(max_length=80)
    incumbent_fingerprint = models.CharField(max_length=128, blank=True, default="")
    incumbent_outcome = models.CharField(max_length=64)
    incumbent_finish = models.CharField(max_length=16, blank=True, default="")
    incumbent_flags = models.JSONField(default=list, blank=True)
    incumbent_tokens = models.PositiveIntegerField(default=0)
    incumbent_engine_s = models.FloatField(default=0.0)
    incumbent_total_s = models.FloatField(default=0.0)

    candidate = models.CharField(max_length=80, blank=True, default="")
    candidate_fingerprint = models.CharField(max_length=128, blank=True, default="")
    candidate_outcome = models.CharField(max_length=64, blank=True, default="")
    candidate_finish = models.CharField(max_length=16, blank=True, default="")
    candidate_flags = models.JSONField(default=list, blank=True)
    candidate_tokens = models.PositiveIntegerField(default=0)
    candidate_engine_s = models.FloatField(default=0.0)
    candidate_total_s = models.FloatField(default=0.0)

    differs = models.BooleanField(null=True)
    similarity = models.FloatField(null=True)
    mean_logprob = models.FloatField(null=True)
    agreement = models.FloatField(null=True)

    scoring = models.CharField(max_length=16, choices=Scoring, blank=True, default="")
    scorer = models.CharField(max_length=200, blank=True, default="")
    score = models.FloatField(null=True)

    prompt = models.TextField(null=True, blank=True)  # noqa: DJ001 (null: may not be stored)
    incumbent_text = models.TextField(null=True, blank=True)  # noqa: DJ001
    candidate_text = models.TextField(null=True, blank=True)  # noqa: DJ001

    objects = PairQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["request_id", "arm"], name="rollouts_pair_once"),
            models.CheckConstraint(
                condition=Q(score=None) | Q(score__gte=-1, score__lte=1),
                name="rollouts_score_range",
            ),
        ]
        indexes = [
            models.Index(fields=["rollout", "arm", "at"], name="rollouts_pair_rollout"),
            models.Index(fields=["at"], name="rollouts_pair_at"),
            models.Index(
                fields=["at"], condition=Q(scoring="waiting"), name="rollouts_pair_to_score"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id} {self.arm}"
