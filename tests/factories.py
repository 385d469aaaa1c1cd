"""Rows for tests, with everything that a test does not care about filled in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from controlplane.access import services as access
from controlplane.endpoints import services as endpoints
from controlplane.endpoints.models import Endpoint
from controlplane.monitoring.models import RequestLog
from controlplane.registry.models import Model, Version
from controlplane.rollouts.freezing import frozen_document
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.policies import find_policy
from inference.protocol import RequestRecord
from inference.queue import Queue
from inference.replicas import Member, SlotState, SlotStatus

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)

TELEMETRY = {"tokens_per_s": 12.5, "batch_rows": 2.0, "mbu": 0.42, "mfu": 0.07, "queue_age_s": 0.0}

_numbers = count(1)


def make_version(*, model: str = "tiny", state: str = "ready", **fields: Any) -> Version:
    """The next version of ``model``."""
    owner, _ = Model.objects.get_or_create(name=model, defaults={"created_at": NOW})
    values: dict[str, Any] = {
        "number": owner.versions.count() + 1,
        "source_kind": "gguf",
        "source": "/models/tiny.gguf",
        "artifact": "/artifacts/0123456789abcdef" if state == "ready" else "",
        "quantization": "none",
        "created_at": NOW,
        "created_by": "ada",
    }
    return Version.objects.create(model=owner, state=state, **values | fields)


def make_endpoint(name: str = "chat", *, live: Version | None = None, **fields: Any) -> Endpoint:
    """An endpoint with its event and outbox row; ``fields`` are written over the row afterwards."""
    endpoint = endpoints.create(name=name, live=live or make_version(), actor="ada", now=NOW)
    if fields:
        Endpoint.objects.filter(pk=endpoint.pk).update(**fields)
    return Endpoint.objects.with_versions().get(pk=endpoint.pk)


def make_rollout(endpoint: Endpoint, candidate: Version, **fields: Any) -> Rollout:
    """A rollout that has just begun, as a row alone: its endpoint knows nothing of it."""
    policy = find_policy("quick", now=NOW)
    values: dict[str, Any] = {
        "endpoint": endpoint,
        "incumbent": endpoint.live,
        "candidate": candidate,
        "policy": policy,
        "document": frozen_document(policy.document),
        "plan": {"judged": ["[]"], "pooled": {}, "not_covered": []},
        "created_by": "ada",
        "created_at": NOW,
        "state_at": NOW,
        "step_at": NOW,
        "deadline_at": NOW + timedelta(days=14),
    }
    return Rollout.objects.create(**values | fields)


def make_control_token(role: str = "viewer") -> str:
    """The clear text of a fresh control token."""
    return access.issue(name="ada", kind="control", role=role, actor="ada", now=NOW).clear_text


def make_api_key() -> str:
    """The clear text of a fresh key of an application."""
    return access.issue(name="shop", kind="inference", actor="ada", now=NOW).clear_text


def hold_ready(queue: Queue, endpoint: str, *versions: str) -> list[Member]:
    """A slot for each version, which reported this moment that it is ready; ``renew`` keeps it so."""
    members = []
    for version in versions:
        member = Member(queue, f"slot-{endpoint}-{version.replace('/', '-')}", lease_ms=60_000)
        member.status = SlotStatus(
            *(member.slot, endpoint, version, SlotState.READY),
            fingerprint="f1",
            kernel="instant",
            telemetry=TELEMETRY,
        )
        assert member.renew()
        members.append(member)
    return members


def make_record(**fields: Any) -> RequestRecord:
    """One line of the request log, as a gateway writes it."""
    values: dict[str, Any] = {
        "id": f"req{next(_numbers)}",
        "key_id": "k1",
        "endpoint": "chat",
        "version": "tiny/1",
        "generation": 1,
        "arm": "live",
        "outcome": "ok",
        "status": 200,
        "finish_reason": "stop",
        "streamed": True,
        "prompt_tokens": 12,
        "completion_tokens": 34,
        "queue_s": 0.001,
        "first_token_s": 0.05,
        "total_s": 0.9,
        "finished_at": NOW.timestamp(),
    }
    return RequestRecord(**values | fields)


def make_log_row(**fields: Any) -> RequestLog:
    """One stored line of the request log."""
    values: dict[str, Any] = {
        "request_id": f"req{next(_numbers)}",
        "endpoint": "chat",
        "version": "tiny/1",
        "generation": 1,
        "outcome": "ok",
        "status": 200,
        "streamed": False,
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "total_s": 0.1,
        "finished_at": NOW,
    }
    return RequestLog.objects.create(**values | fields)
