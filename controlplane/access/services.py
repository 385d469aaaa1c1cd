"""Issuing keys, taking them back, and telling the gateways."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus

from django.db import transaction

from controlplane.access.cache import KEY_PREFIX, KeyRecord, digest_key
from controlplane.access.models import ROLES, ApiKey
from controlplane.errors import DomainError
from controlplane.events.services import record
from inference.queue import Queue

PREFIXES = {ApiKey.Kind.INFERENCE: KEY_PREFIX, ApiKey.Kind.CONTROL: "ct-tatkal"}
SECRET_BYTES = 32
DEFAULT_OVERLAP = timedelta(hours=24)

_TOKEN = re.compile(r"(?P<prefix>(?:sk|ct)-tatkal)-(?P<id>[a-z0-9]{1,32})-[A-Za-z0-9_-]{32,128}")
MAX_ENDPOINTS = 100
_ENDPOINT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NO_DIGEST = digest_key("")


class InvalidToken(DomainError):
    """No such key or token, or no longer; which of the two is not told."""

    code = "invalid_token"
    status = HTTPStatus.UNAUTHORIZED


class InvalidKeyRequest(DomainError):
    """A key cannot be issued as described."""

    code = "invalid_key_request"
    status = HTTPStatus.BAD_REQUEST


class KeyEnded(DomainError):
    """The key is revoked or expired; issue a new one."""

    code = "key_ended"
    status = HTTPStatus.CONFLICT


@dataclass(frozen=True, slots=True)
class Issued:
    """A new key; ``clear_text`` exists here and in its owner's hands, nowhere else."""

    key: ApiKey
    clear_text: str


@transaction.atomic
def issue(
    *,
    name: str,
    kind: str,
    actor: str,
    now: datetime,
    role: str = "",
    endpoints: Sequence[str] = (),
    expires_at: datetime | None = None,
) -> Issued:
    """Make a key. Gateways accept it after the next ``publish``, for ``endpoints`` alone where some are named.

    Raises:
        InvalidKeyRequest: kind, role, endpoints or expiry cannot be.
    """
    _check(name, kind, role, expires_at, now)
    check_endpoints(kind, endpoints)
    key_id = secrets.token_hex(6)
    clear_text = f"{PREFIXES[ApiKey.Kind(kind)]}-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
    key = ApiKey.objects.create(
        key_id=key_id,
        name=name,
        kind=kind,
        role=role,
        endpoints=list(dict.fromkeys(endpoints)),
        digest=digest_key(clear_text),
        last4=clear_text[-4:],
        created_at=now,
        created_by=actor,
        expires_at=expires_at,
    )
    _record("key.issued", key, actor=actor, now=now)
    return Issued(key, clear_text)


@transaction.atomic
def revoke(*, key_id: str, actor: str, now: datetime, reason: str = "") -> ApiKey:
    """End a key. Repeating it changes nothing. Gateways refuse it after the next ``publish`` and their own cache."""
    key = ApiKey.objects.select_for_update().get(key_id=key_id)
    if key.revoked_at is None:
        key.revoked_at = now
        key.save(update_fields=["revoked_at"])
        _record("key.revoked", key, actor=actor, now=now, reason=reason)
    return key


@transaction.atomic
def rotate(
    *, key_id: str, actor: str, now: datetime, overlap: timedelta = DEFAULT_OVERLAP
) -> Issued:
    """A successor with the same name, kind, role and endpoints; the old key ends after ``overlap`` at the latest.

    Raises:
        KeyEnded: the key opens nothing any more.
    """
    old = ApiKey.objects.select_for_update().get(key_id=key_id)
    if old.state_at(now) != "active":
        raise KeyEnded(f"Key {old.key_id} is {old.state_at(now)}; issue a new one.")
    issued = issue(
        name=old.name,
        kind=old.kind,
        role=old.role,
        endpoints=old.endpoints,
        actor=actor,
        now=now,
    )
    old.expires_at = min(old.expires_at or now + overlap, now + overlap)
    old.save(update_fields=["expires_at"])
    _record("key.rotated", old, actor=actor, now=now, reason=f"replaced by {issued.key.key_id}")
    return issued


def publish(*, queue: Queue, now: datetime) -> int:
    """Tell the gateways of every application's key, ended ones included; returns how many.

    Whole states, so it may run at any time, twice, or after Redis was emptied.
    """
    records = {key.key_id: _record_of(key, now).to_json() for key in ApiKey.objects.inference()}
    queue.put_keys(records)
    return len(records)


def find(*, token: str, now: datetime) -> ApiKey:
    """The active key or control token behind a clear text.

    Raises:
        InvalidToken: malformed, unknown, ended, or another secret.
    """
    match = _TOKEN.fullmatch(token)
    key = ApiKey.objects.filter(key_id=match["id"]).first() if match else None
    # The digests are compared for unknown ids too, so that time tells nothing.
    is_same = hmac.compare_digest(digest_key(token), key.digest if key else _NO_DIGEST)
    if key is None or not is_same or key.state_at(now) != "active":
        raise InvalidToken("The token is not valid, or no longer.")
    return key


def authenticate_control(*, token: str, now: datetime) -> ApiKey:
    """The control token behind a clear text; an application's key is none.

    Raises:
        InvalidToken: it opens nothing here.
    """
    key = find(token=token, now=now)
    if key.kind != ApiKey.Kind.CONTROL:
        raise InvalidToken("The token is not valid, or no longer.")
    return key


def check_endpoints(kind: str, endpoints: Sequence[str]) -> None:
    """Whether a key of ``kind`` can be limited to ``endpoints``, which need not exist yet.

    Raises:
        InvalidKeyRequest: it cannot.
    """
    if endpoints and kind != ApiKey.Kind.INFERENCE:
        raise InvalidKeyRequest(
            "endpoints belong to an application's key; leave them out for a control token."
        )
    if len(endpoints) > MAX_ENDPOINTS:
        raise InvalidKeyRequest(
            f"{len(endpoints)} endpoints are more than {MAX_ENDPOINTS}; name none to allow all of them."
        )
    for name in endpoints:
        if not _ENDPOINT.fullmatch(name):
            raise InvalidKeyRequest(
                f"endpoints: {name!r} cannot be the name of an endpoint; use lower-case letters, digits, "
                "'.', '_' and '-'."
            )


def _record_of(key: ApiKey, now: datetime) -> KeyRecord:
    # An ended key stays published as a refusal: a Redis that comes back from an old file learns of it again.
    return KeyRecord(
        digest=key.digest,
        name=key.name,
        endpoints=tuple(key.endpoints),
        revoked=key.state_at(now) != "active",
    )


def _check(name: str, kind: str, role: str, expires_at: datetime | None, now: datetime) -> None:
    if not name.strip():
        raise InvalidKeyRequest("name is empty; say who or what will hold the key.")
    if kind not in ApiKey.Kind.values:
        raise InvalidKeyRequest(f"kind={kind!r} must be one of {', '.join(ApiKey.Kind.values)}.")
    if kind == ApiKey.Kind.INFERENCE and role:
        raise InvalidKeyRequest(f"role={role!r} belongs to control tokens; leave it empty.")
    if kind == ApiKey.Kind.CONTROL and role not in ROLES:
        raise InvalidKeyRequest(f"role={role!r} must be one of {', '.join(ROLES)}.")
    if expires_at is not None and expires_at <= now:
        raise InvalidKeyRequest(f"expires_at={expires_at.isoformat()} is past.")


def _record(type: str, key: ApiKey, *, actor: str, now: datetime, reason: str = "") -> None:
    data = {
        "name": key.name,
        "kind": key.kind,
        "role": key.role,
        "endpoints": key.endpoints,
        "last4": key.last4,
    }
    record(type=type, subject=f"key:{key.key_id}", actor=actor, now=now, reason=reason, data=data)
