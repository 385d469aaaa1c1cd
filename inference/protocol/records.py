"""What is remembered of a request when it has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from inference.protocol.text import dumps


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One line of the request log: numbers and names; texts only where the endpoint stores them.

    ``outcome`` is ``ok``, ``cancelled``, or the failure's code. Times are seconds as the gateway saw them, but for
    ``queue_s``, which only the slot knows. ``finished_at`` is epoch seconds.
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

    def to_json(self) -> str:
        """One entry of the ``log`` stream."""
        return dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        return cls(**json.loads(text))
