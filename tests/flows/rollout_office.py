"""A control worker with a clock of its own, beside those of an instance: what would come in minutes, it does now.

A request may take its deadline, and a copy of it a minute more, before a block of time is counted. Here a block is counted as soon
as everything that came in it has ended and is stored, by the same call with a clock that is ahead. For a process of its own,
with Django set up: ``main()`` reads one JSON object per line and answers with one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from controlplane.monitoring.models import RequestLog
from controlplane.rollouts import evidence, intake, loop
from controlplane.rollouts.gates import Memory, judge, look
from controlplane.rollouts.judging import boards_of
from controlplane.rollouts.machine import FINAL
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.pairs import Pair
from controlplane.rollouts.policy import parse_policy
from drift.segments import OVERALL, Plan
from inference.queue import Queue
from tests.inference.slot_process import wait_until

QUIET_TIMEOUT_S = 60.0


def count(rollout: str, num_requests: int) -> dict[str, Any]:
    """Count every block before this moment, once ``num_requests`` and all their copies have ended and are stored."""
    row = Rollout.objects.with_names().get(key=rollout)
    answered = RequestLog.objects.of_endpoint(row.endpoint.name).filter(
        finished_at__gte=row.created_at
    )
    with Queue(settings.REDIS_URL) as queue:
        wait_until(lambda: answered.count() >= num_requests, timeout_s=QUIET_TIMEOUT_S)
        wait_until(lambda: not intake.collect(queue), timeout_s=QUIET_TIMEOUT_S)
    policy = parse_policy(row.document)
    time.sleep(policy.block_s)  # what came last is in a block that is over then
    ahead = timedelta(seconds=row.endpoint.deadline_s + evidence.LAG_S)
    while evidence.collect(rollout=row, policy=policy, now=timezone.now() + ahead):
        row = Rollout.objects.with_names().get(key=rollout)
    return {"num_pairs": Pair.objects.of_rollout(rollout).count()}


def pool(rollout: str) -> dict[str, Any]:
    """What the same gates would say of the same observations, were they asked for all traffic alone."""
    row = Rollout.objects.with_names().get(key=rollout)
    policy = parse_policy(row.document)
    boards = boards_of(row, policy, Plan((OVERALL,), {}, ()))
    judgement = judge(boards, look(boards, Memory(), policy), policy)
    return {
        "decision": judgement.decision,
        "results": [
            {
                "metric": result.metric,
                "verdict": result.verdict,
                "n": result.n,
                "estimate": result.bounds.estimate if result.bounds else None,
                "upper": result.bounds.upper if result.bounds else None,
                "sentence": result.sentence,
            }
            for result in judgement.results
        ],
    }


def wait_out(rollout: str) -> dict[str, Any]:
    """Once a tick has seen that the candidate is gone, tick as if it had been for as long as is waited for it."""
    rows = Rollout.objects.filter(key=rollout)
    wait_until(
        lambda: rows.exclude(unready_since=None).exists() or rows.get().state in FINAL,
        timeout_s=QUIET_TIMEOUT_S,
    )
    with Queue(settings.REDIS_URL) as queue:
        num_moves = loop.tick(queue=queue, now=timezone.now() + timedelta(seconds=loop.GONE_S))
    return {"num_moves": num_moves}


def tell(rollout: str) -> dict[str, Any]:
    """What was expected at the start, and every pair as it was compared."""
    row = Rollout.objects.get(key=rollout)
    columns = ("arm", "state", "reason", "differs", "similarity", "agreement", "mean_logprob")
    costs = ("incumbent_engine_s", "candidate_engine_s", "request_id")
    pairs = Pair.objects.of_rollout(rollout).order_by("at", "arm").values(*columns, *costs)
    return {"forecast": row.forecast, "pairs": list(pairs)}


def main() -> None:
    """Answer until the input ends."""
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "count": count,
        "pool": pool,
        "wait_out": wait_out,
        "tell": tell,
    }
    for line in sys.stdin:
        asked = json.loads(line)
        reply = commands[asked.pop("do")](**asked)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
