"""Saving policies as versions, and finding them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.errors import DomainError
from controlplane.events.services import record
from controlplane.rollouts.documents import InvalidPolicy
from controlplane.rollouts.models import Policy
from controlplane.rollouts.policy import parse_policy
from controlplane.rollouts.presets import PRESETS
from controlplane.rollouts.validation import check_policy

ATTEMPTS = 5
AUTHOR = "tatkal"


class UnknownPolicy(DomainError):
    """There is no such policy."""

    code = "unknown_policy"
    status = HTTPStatus.BAD_REQUEST


def save_policy(
    *,
    name: str,
    document: Mapping[str, Any],
    actor: str,
    now: datetime,
    description: str = "",
) -> Policy:
    """The next version of policy ``name``; a document that is its newest version already adds none.

    Raises:
        InvalidPolicy: it could not guide a rollout, or the name is malformed; the message says what to mend.
    """
    check_policy(parse_policy(document))
    for _ in range(ATTEMPTS):
        newest = Policy.objects.newest(name).first()
        if newest is not None and _canonical(newest.document) == _canonical(document):
            return newest
        row = Policy(
            name=name,
            version=newest.version + 1 if newest else 1,
            document=dict(document),
            description=description,
            created_at=now,
            created_by=actor,
        )
        _check_name(row)
        if _insert(row, actor, now):
            return row
    raise InvalidPolicy(f"Policy {name!r} is being saved by somebody else; try again.")


def find_policy(name: str, *, now: datetime) -> Policy:
    """The policy ``name/version``, or the newest version of ``name``; a preset is saved when it is first used.

    Raises:
        UnknownPolicy: there is none.
    """
    found = Policy.objects.named(name).first()
    if found is None and name in PRESETS:
        return save_policy(name=name, document=PRESETS[name], actor=AUTHOR, now=now)
    if found is None:
        presets = ", ".join(PRESETS)
        raise UnknownPolicy(f"There is no policy {name!r}; save one, or use one of {presets}.")
    return found


def ensure_presets(*, now: datetime) -> None:
    """Save the presets that have no version yet, so that lists show them."""
    for name in PRESETS:
        find_policy(name, now=now)


def _insert(row: Policy, actor: str, now: datetime) -> bool:
    """Whether the number was still free."""
    try:
        with transaction.atomic():
            row.save(force_insert=True)
            record(
                type="policy.saved",
                subject=f"policy:{row.name}",
                actor=actor,
                now=now,
                data={"policy": str(row), "document": row.document},
            )
    except IntegrityError:
        return False
    return True


def _check_name(row: Policy) -> None:
    try:
        row.clean_fields(exclude=["document", "created_by"])
    except ValidationError as error:
        told = "; ".join(
            f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items()
        )
        raise InvalidPolicy(f"Policy {row.name!r}: {told}") from error


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True)
