"""``Idempotency-Key``: a request that is sent again is answered again, not carried out again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from controlplane.access.models import ApiKey, IdempotentRequest
from controlplane.errors import DomainError

KEPT_FOR = timedelta(hours=24)
# Longer than any answer takes: after that the process that was at it has died.
ABANDONED_AFTER = timedelta(seconds=60)
MAX_KEY_LENGTH = 128


class InvalidIdempotencyKey(DomainError):
    """The key is empty, too long, or not printable."""

    code = "invalid_idempotency_key"
    status = HTTPStatus.BAD_REQUEST


class IdempotencyKeyReused(DomainError):
    """The key belongs to another request; choose a new key for every request that is not a repeat."""

    code = "idempotency_key_reused"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class RequestInProgress(DomainError):
    """The same request is being answered at this moment."""

    code = "request_in_progress"
    status = HTTPStatus.CONFLICT
    permanent = False


@dataclass(frozen=True, slots=True)
class Begun:
    """A place held under a key: either it has an answer already, or the holder is to ``keep`` or ``drop`` it."""

    row: IdempotentRequest

    @property
    def is_answered(self) -> bool:
        """Whether this is a repeat, whose answer is ``row.status`` and ``row.answer``."""
        return self.row.status is not None


def digest_request(method: str, path: str, body: Any) -> str:
    """What two requests have in common that ask for the same; the order of fields does not matter."""
    text = json.dumps([method, path, body], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def begin(*, caller: ApiKey, key: str, digest: str, now: datetime) -> Begun:
    """Hold the place of ``key``, or find the answer that was given under it.

    Raises:
        InvalidIdempotencyKey: the key cannot be one.
        IdempotencyKeyReused: another request was sent under it.
        RequestInProgress: its first sending is not answered yet.
    """
    if not 0 < len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        raise InvalidIdempotencyKey(
            f"Idempotency-Key must be 1 to {MAX_KEY_LENGTH} printable characters, such as a UUID."
        )
    _forget(IdempotentRequest.objects.filter(caller=caller, key=key), now)
    try:
        with transaction.atomic():
            row = IdempotentRequest.objects.create(
                caller=caller, key=key, digest=digest, created_at=now
            )
    except IntegrityError:
        return _find(caller, key, digest)
    return Begun(row)


def keep(*, begun: Begun, status: int, answer: Any, location: str = "") -> None:
    """Keep the answer for repeats; ``location`` is where it says that something new is found."""
    rows = IdempotentRequest.objects.filter(pk=begun.row.pk)
    rows.update(status=status, answer=answer, location=location)


def drop(*, begun: Begun) -> None:
    """Free the key: the request changed nothing, and may be tried again under it."""
    IdempotentRequest.objects.filter(pk=begun.row.pk, status=None).delete()


def expire(*, now: datetime) -> int:
    """Forget answers older than ``KEPT_FOR`` and requests that nobody answers any more; returns how many."""
    return _forget(IdempotentRequest.objects.all(), now)


def _forget(rows: QuerySet[IdempotentRequest], now: datetime) -> int:
    num_old, _ = rows.filter(created_at__lte=now - KEPT_FOR).delete()
    abandoned = rows.filter(status=None, created_at__lte=now - ABANDONED_AFTER)
    num_abandoned, _ = abandoned.delete()
    return num_old + num_abandoned


def _find(caller: ApiKey, key: str, digest: str) -> Begun:
    row = IdempotentRequest.objects.filter(caller=caller, key=key).first()
    if row is None or (row.digest == digest and row.status is None):
        raise RequestInProgress(
            f"The request with Idempotency-Key {key!r} is being answered; ask again.",
            retry_after_s=1,
        )
    if row.digest != digest:
        raise IdempotencyKeyReused(
            f"Idempotency-Key {key!r} was sent with another request; use a new key for this one."
        )
    return Begun(row)
