"""What is remembered of a request when it has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from inference.protocol.text import dumps, known_fields

_FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One line of the request log: numbers and names; texts only where the endpoint stores them.

    ``outcome`` is ``ok``, ``cancelled``, or the failure's code. Times are seconds as the gateway saw them, but for
    ``queue_s`` and ``engine_s``, which only the slot knows. ``finished_at`` is epoch seconds.
    """

    id: str
    key_id: str
    endpoint: str
    version: str
    generation: int
    arm: str
    outcome: str
    status: int
    finish_reason: str
    streamed: bool
    prompt_tokens: int
    completion_tokens: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float
    finished_at: float
    user: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None
    completion: str | None = None
    engine_s: float | None = None
    cached_tokens: int = 0

    def to_json(self) -> str:
        """One entry of the ``log`` stream."""
        return dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``, also of another release."""
        return cls(**known_fields(cls, json.loads(text)))


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """What a caller thought of an answer: a line of the request log beside the request's own.

    ``rating`` is from -1, bad, to 1, good. ``at`` is epoch seconds.
    """

    request_id: str
    key_id: str
    rating: float
    at: float
    comment: str = ""

    def to_json(self) -> str:
        """One entry of the ``log`` stream, told from a request's by its kind."""
        return dumps(asdict(self) | {"kind": _FEEDBACK})


def read_record(text: str | bytes) -> RequestRecord | FeedbackRecord:
    """Either line of the request log."""
    data = json.loads(text)
    kind = data.pop("kind", "")
    record = FeedbackRecord if kind == _FEEDBACK else RequestRecord
    return record(**known_fields(record, data))
