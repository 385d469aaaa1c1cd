"""What rollouts do by themselves: a tick looks at where each stands and what is known, and moves it one step or more.

It is level-triggered: it keeps nothing in memory and expects nothing of the tick before, so it may be run twice, at once
with itself, late, or after a crash between any two lines.
"""

from __future__ import annotations

import logging
import math
from datetime import datetime, timedelta

import numpy as np

from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.slots import Report, read_report
from controlplane.errors import DomainError
from controlplane.monitoring.models import RequestLog
from controlplane.rollouts.decisions import Facts, Move, View, decide
from controlplane.rollouts.evidence import collect
from controlplane.rollouts.freezing import fix_missing_limits
from controlplane.rollouts.gates import Decision
from controlplane.rollouts.judging import failing_gates, judge_again, undecided_gate
from controlplane.rollouts.machine import FINAL, State
from controlplane.rollouts.models import Rollout, Step
from controlplane.rollouts.pairs import Pair
from controlplane.rollouts.policy import CANARY, SCORE, SHADOW, Policy, parse_policy
from controlplane.rollouts.shapes import plan_from_json, segment_to_text
from controlplane.rollouts.steps import EVIDENCE, Kind, StepRule, evidence_step
from controlplane.rollouts.transitions import By, carry_out, readiness_of
from drift.eprocess import RATE, Side, log_e_values
from drift.segments import OVERALL, describe
from inference.queue import Queue, QueueUnavailable
from inference.replicas import LoadFailure

logger = logging.getLogger(__name__)

ACTOR = "rollouts"
# One tick makes no more moves than this; the next goes on.
MAX_MOVES = 8
# A candidate that answered and is gone for so long is not coming back in time to be judged.
GONE_S = 30.0
# So many failures in a row, and nothing else, are no bad luck of any version that serves.
NUM_FAILURES = 20
MAX_WHY = 500


def tick(*, queue: Queue, now: datetime) -> int:
    """Move every active rollout as far as it goes; returns the number of moves.

    A rollout that cannot be moved now is logged and met again by the next tick; the others do not wait for it.
    """
    num_moves = 0
    for rollout in Rollout.objects.active().with_names().order_by("pk"):
        try:
            num_moves += tick_one(rollout=rollout, queue=queue, now=now)
        except DomainError as error:
            logger.warning("rollout waits rollout=%s error=%s", rollout.key, error)
        except Exception:
            logger.exception("rollout cannot be moved rollout=%s", rollout.key)
    return num_moves


def tick_one(*, rollout: Rollout, queue: Queue, now: datetime) -> int:
    """Count, look, decide and move, until there is something to wait for.

    Raises:
        RolloutChanged, HoldLost, MoveRefused: the world changed under it; the next tick sees it as it is then.
    """
    policy = parse_policy(rollout.document)
    report = _report(queue)
    while collect(rollout=rollout, policy=policy, now=now):
        rollout = Rollout.objects.with_names().get(pk=rollout.pk)
        fix_missing_limits(rollout=rollout, policy=policy, now=now)
    rollout = judge_again(rollout=rollout, policy=policy, now=now)
    rollout = _note_readiness(rollout, report, now)
    for num_moves in range(MAX_MOVES):
        if rollout.state in FINAL:
            return num_moves
        facts = gather(rollout=rollout, policy=policy, report=report, now=now)
        choice = decide(view_of(rollout, policy), facts)
        if not isinstance(choice, Move):
            _note_why(rollout, choice.reason)
            return num_moves
        rollout = carry_out(
            rollout=rollout,
            move=choice,
            by=By(ACTOR, now),
            queue=queue,
            readiness=readiness_of(rollout, report),
        )
        logger.info(
            "rollout moved rollout=%s trigger=%s state=%s reason=%s",
            rollout.key, choice.trigger, rollout.state, choice.reason,
        )  # fmt: skip
    return MAX_MOVES


def view_of(rollout: Rollout, policy: Policy) -> View:
    """The rollout as the rules see it."""
    return View(
        state=State(rollout.state),
        step_index=rollout.step_index,
        step_at=rollout.step_at,
        deadline_at=rollout.deadline_at,
        is_released=rollout.is_released,
        hold=rollout.hold,
        policy=policy,
    )


def gather(*, rollout: Rollout, policy: Policy, report: Report | None, now: datetime) -> Facts:
    """What is known of a rollout at this moment."""
    endpoint = Endpoint.objects.with_versions().get(pk=rollout.endpoint_id)
    readiness = readiness_of(rollout, report)
    step = evidence_step(policy.steps, rollout.step_index)
    failing = [gate for gate in failing_gates(rollout) if gate not in rollout.overrides]
    return Facts(
        now=now,
        is_held=endpoint.rollout == rollout.key,
        is_ready=rollout.candidate.name in (readiness.versions or ()),
        broken=tell_broken(rollout, report, now),
        decision=Decision(rollout.decision),
        reason=rollout.verdict_reason,
        failing=tuple(failing),
        short_of=_tell_short(rollout, policy) if step else "",
        undecided=undecided_gate(rollout, _modes(step), policy) if step else "",
        baking=_tell_baking(rollout, policy) if rollout.state == State.BAKING else "",
        missing=readiness.missing,
    )


def tell_broken(rollout: Rollout, report: Report | None, now: datetime) -> str:
    """Why the candidate cannot serve: it does not load, is gone, or does nothing but fail. Empty when nothing is known."""
    candidate = rollout.candidate.name
    if report is not None and (failure := _load_failure(rollout, report)):
        return f"{candidate} could not be loaded: {failure.detail}"
    since = rollout.unready_since
    if since is not None and now - since >= timedelta(seconds=GONE_S):
        return f"no slot has held {candidate} ready for {(now - since).total_seconds():.0f} s"
    if _fails_always(rollout):
        return f"the last {NUM_FAILURES} requests that {candidate} was given all failed"
    return ""


def _load_failure(rollout: Rollout, report: Report) -> LoadFailure | None:
    """How loading the candidate failed. A try that is under way is none, unless the process that made it is gone."""
    endpoint, candidate = rollout.endpoint.name, rollout.candidate.name
    is_being_loaded = bool(report.slots_of(endpoint, candidate))
    ours = (f for f in report.failures if (f.endpoint, f.version) == (endpoint, candidate))
    return next((f for f in ours if not (f.is_under_way and is_being_loaded)), None)


def _report(queue: Queue) -> Report | None:
    try:
        return read_report(queue=queue)
    except QueueUnavailable:
        return None


def _note_readiness(rollout: Rollout, report: Report | None, now: datetime) -> Rollout:
    """Remember since when a candidate that was ready is not; nobody knows while Redis is away."""
    is_known = report is not None and rollout.state != State.PREPARING
    ready = report.ready_versions(rollout.endpoint.name) if report else frozenset()
    is_gone = is_known and rollout.candidate.name not in ready
    since = (rollout.unready_since or now) if is_gone else None
    if since != rollout.unready_since:
        Rollout.objects.filter(pk=rollout.pk, version=rollout.version).update(unready_since=since)
        rollout.unready_since = since
    return rollout


def _note_why(rollout: Rollout, reason: str) -> None:
    """Keep what it waits for, for people; a move that came between has the last word."""
    why = reason[:MAX_WHY]
    if why != rollout.why:
        Rollout.objects.filter(pk=rollout.pk, version=rollout.version).update(why=why)


def _modes(step: StepRule | None) -> frozenset[str]:
    """The kinds of traffic that a step brings."""
    if step is None:
        return frozenset()
    if step.kind is Kind.SCORE:
        return frozenset({SCORE})
    if step.kind is Kind.SHADOW:
        return frozenset({SHADOW})
    return frozenset({CANARY, SHADOW}) if step.share else frozenset({CANARY})


def _tell_short(rollout: Rollout, policy: Policy) -> str:
    """Which segment has not reached the floor of the step; empty where all have."""
    step = policy.steps[rollout.step_index] if rollout.step_index < len(policy.steps) else None
    if step is None or step.kind not in EVIDENCE or not step.floor:
        return ""
    row = Step.objects.filter(rollout=rollout, index=rollout.step_index).first()
    counts = row.counts if row else {}
    segments = (OVERALL,) if step.kind is Kind.CANARY else plan_from_json(rollout.plan).judged
    for segment in segments:
        n = counts.get(segment_to_text(segment), 0)
        if n < step.floor:
            return f"{describe(segment)} has {n} of the {step.floor} observations of this step"
    return ""


def _fails_always(rollout: Rollout) -> bool:
    """Whether the last requests and copies that the candidate was given all ended without an answer."""
    if rollout.step_index < 0:
        return False
    requests = (
        RequestLog.objects.of_endpoint(rollout.endpoint.name)
        .served_by(rollout.candidate.name)
        .filter(finished_at__gte=rollout.created_at)
        .exclude(outcome="cancelled")
        .order_by("-finished_at")
        .values_list("finished_at", "status")[:NUM_FAILURES]
    )
    copies = (
        Pair.objects.of_rollout(rollout.key)
        .filter(arm__in=(SHADOW, SCORE))
        .observed()
        .order_by("-at")
        .values_list("at", "state")[:NUM_FAILURES]
    )
    ends = [(at, status >= 500) for at, status in requests]
    ends += [(at, state == Pair.State.FAILED) for at, state in copies]
    last = sorted(ends, reverse=True)[:NUM_FAILURES]
    return len(last) == NUM_FAILURES and all(has_failed for _, has_failed in last)


def _tell_baking(rollout: Rollout, policy: Policy) -> str:
    """What is wrong with the candidate since it is live: too many requests without an answer, beyond doubt."""
    if rollout.promoted_at is None:
        return ""
    step = policy.steps[-1] if policy.steps and policy.steps[-1].kind is Kind.BAKE else None
    allowed = step.max_failure_rate if step else 0.05
    answered = (
        RequestLog.objects.of_endpoint(rollout.endpoint.name)
        .served_by(rollout.candidate.name)
        .filter(finished_at__gte=rollout.promoted_at)
        .exclude(outcome="cancelled")
    )
    n = answered.count()
    num_failed = answered.filter(status__gte=500).count()
    counts = np.array([n - num_failed, 0, num_failed], dtype=np.int64)
    if log_e_values(counts, RATE, allowed, Side.ABOVE) < -math.log(policy.alpha):
        return ""
    return f"{num_failed:,} of {n:,} requests since the promotion have no answer, more than the {allowed:.1%} allowed"
