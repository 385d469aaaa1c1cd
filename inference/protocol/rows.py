"""What is answered: rows of tokens, framed per engine step and gateway."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from inference.protocol.sampling import FinishReason
from inference.protocol.text import dumps


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole answer: why it ended, what it used, and where the time went (seconds, slot's clock).

    ``queue_s`` runs from arrival to the first step that computed a token of the request, ``first_token_s`` from
    arrival to the first output token, ``total_s`` from arrival to the last.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A visible error instead of an answer, in the terms of the HTTP reply it becomes.

    ``retry_after_s`` is set where trying again later can help.
    """

    code: str
    message: str
    status: int
    param: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One output token of one request; ``text`` is empty while a character is incomplete.

    Row -1 is no token: it announces an attempt under the fingerprint that will compute it, before there is a token.
    """

    request_id: str
    attempt: int
    seq: int
    text: str
    finish: Finished | None = None
    failure: Failure | None = None

    @property
    def is_last(self) -> bool:
        """Whether no row follows."""
        return self.finish is not None or self.failure is not None


@dataclass(frozen=True, slots=True)
class StepFrame:
    """All rows of one engine step for one gateway, with who computed them.

    ``fingerprint`` names the numerics: two slots with equal fingerprints give the same tokens.
    """

    slot: str
    version: str
    fingerprint: str
    rows: tuple[TokenRow, ...]

    def to_json(self) -> str:
        """One stream field; rows are short lists, because there are thousands a second."""
        rows = [
            [
                row.request_id,
                row.attempt,
                row.seq,
                row.text,
                _as_dict(row.finish),
                _as_dict(row.failure),
            ]
            if row.is_last
            else [row.request_id, row.attempt, row.seq, row.text]
            for row in self.rows
        ]
        return dumps([self.slot, self.version, self.fingerprint, rows])

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        slot, version, fingerprint, rows = json.loads(text)
        return cls(slot, version, fingerprint, tuple(_row_from_list(row) for row in rows))


def _row_from_list(row: list[Any]) -> TokenRow:
    request_id, attempt, seq, text, *end = row
    finish, failure = end or (None, None)
    if finish is not None:
        finish["reason"] = FinishReason(finish["reason"])
    return TokenRow(
        request_id,
        attempt,
        seq,
        text,
        Finished(**finish) if finish is not None else None,
        Failure(**failure) if failure is not None else None,
    )


def _as_dict(value: Finished | Failure | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
