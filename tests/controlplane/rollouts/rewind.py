"""Time that has passed for a rollout of a running installation: for a process of its own, with Django set up.

Gates look at a time block when every copy of it must have ended, a minute and a half later. Tests do not wait so long:
they put the newest rollout that far into the past, with the pairs that it would have gathered meanwhile.
"""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from controlplane.rollouts.models import Rollout, Step
from controlplane.rollouts.pairs import Pair
from tests.controlplane.rollouts.world import make_pair

NUM_PAIRS = 1600
PASSED_S = 300
GATHERED_AT_S = 200.0


@transaction.atomic
def rewind(*, failing_language: str) -> None:
    """The candidate failed on most of one language, a fiftieth of the traffic, and answered all else."""
    rollout = Rollout.objects.with_names().newest_first()[0]
    since = timezone.now() - timedelta(seconds=GATHERED_AT_S)
    bad, good = rollout.candidate.name, rollout.incumbent.name
    Pair.objects.bulk_create(
        _pair(rollout, since + timedelta(seconds=number / 200), number, failing_language, bad, good)
        for number in range(NUM_PAIRS)
    )
    blocks = PASSED_S // int(rollout.document["block_s"])
    passed = timedelta(seconds=PASSED_S)
    times = {name: F(name) - passed for name in ("created_at", "state_at", "step_at")}
    blocks_back = {name: F(name) - blocks for name in ("sealed_block", "looked_block")}
    Rollout.objects.filter(pk=rollout.pk).update(**times, **blocks_back)
    Step.objects.filter(rollout=rollout).update(entered_at=F("entered_at") - passed)


def _pair(
    rollout: Rollout, at: datetime, number: int, language: str, candidate: str, incumbent: str
) -> Pair:
    is_bad = number % 50 == 0
    has_failed = is_bad and number % 200 != 0
    fields: dict[str, Any] = {
        "request_id": f"past{number}",
        "endpoint": rollout.endpoint.name,
        "candidate": candidate,
        "incumbent": incumbent,
        "segments": {"lang": language if is_bad else "en"},
        "prompt_digest": f"past{number}",
        "reason": "engine_failed" if has_failed else "",
    }
    if is_bad:
        fields |= {
            "prompt": "¿Cuándo me devuelven el dinero?",
            "incumbent_text": "En <b>cinco</b> días.",
        }
    return make_pair(rollout.key, "shadow", at, has_failed=has_failed, **fields)


def main() -> None:
    """``manage.py shell -c`` calls it."""
    rewind(failing_language="es")
    sys.stdout.write("done\n")
