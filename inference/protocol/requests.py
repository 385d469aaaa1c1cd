"""What is asked: a request as the gateway hands it over, and its small entry in a version's queue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from inference.protocol.sampling import InvalidParameter, SamplingParams
from inference.protocol.text import dumps, without_defaults

MAX_CHOICES = 8
# What a slot of the last release does not know goes only where it says something.
_NEW_FIELDS: Mapping[str, Any] = {"n": 1, "cache_salt": "", "score_text": None}
_NEW_SAMPLING_FIELDS: Mapping[str, Any] = {"logprobs": None}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the gateway hands it to whichever slot serves its endpoint.

    Exactly one of ``messages``, ``prompt`` and ``prompt_token_ids`` is set. ``id`` is made by the gateway, never
    taken from the caller. ``deadline_s`` counts from the moment the request is queued. ``unset`` names the parameters of
    ``sampling`` that the caller left out, so that the version that answers may fill them.

    ``n`` answers are drawn, each with noise of its own. ``cache_salt`` keeps the prompt's cached blocks from other
    callers; the gateway makes it, never the caller. Where ``score_text`` is set, nothing is generated: it is the answer,
    and the version tells how probable it finds each of its tokens.
    """

    id: str
    endpoint: str
    sampling: SamplingParams
    deadline_s: float
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    key_id: str = ""
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    n: int = 1
    cache_salt: str = ""
    score_text: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidParameter(
                "n", f"n={self.n} is out of range; it must be at least 1 and at most {MAX_CHOICES}."
            )

    def to_json(self) -> str:
        """The body kept in ``req:{id}`` while the request lives."""
        data = without_defaults(asdict(self), _NEW_FIELDS)
        data["sampling"] = without_defaults(data["sampling"], _NEW_SAMPLING_FIELDS)
        return dumps(data)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        data = json.loads(text)
        sampling = data.pop("sampling")
        sampling["stop"] = tuple(sampling["stop"])
        sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
        if data["messages"] is not None:
            data["messages"] = tuple(ChatMessage(**message) for message in data["messages"])
        if data["prompt_token_ids"] is not None:
            data["prompt_token_ids"] = tuple(data["prompt_token_ids"])
        data["unset"] = tuple(data.get("unset", ()))  # gateways of an older release do not send it
        return cls(sampling=SamplingParams(**sampling), **data)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """What stands in a version's queue: small, the body lies under ``req:{id}``.

    Times are milliseconds of the Redis server's clock, which all processes share. An empty ``gateway`` means that
    nobody waits for the rows (a shadow copy, a golden replay). ``attempt`` is how often the request was delivered in
    queues it has been moved from; generation and arm stay as they were when it came. ``rollout`` is what a copy was
    made for.
    """

    id: str
    gateway: str
    arrival_ms: int
    deadline_ms: int
    generation: int
    arm: str
    attempt: int = 0
    rollout: str = ""

    def to_fields(self) -> dict[str, str]:
        """Stream fields of the entry."""
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self:
        """Rebuild from stream fields."""
        return cls(
            id=fields["id"],
            gateway=fields["gateway"],
            arrival_ms=int(fields["arrival_ms"]),
            deadline_ms=int(fields["deadline_ms"]),
            generation=int(fields["generation"]),
            arm=fields["arm"],
            attempt=int(fields.get("attempt", 0)),
            rollout=fields.get("rollout", ""),
        )

    def count_attempts(self, deliveries: int) -> int:
        """How often it was delivered in all, after so many times in its present queue.

        Of a suspect from another queue the first delivery does not count: it is its way to those who take few.
        """
        return self.attempt + deliveries - 1 if self.attempt else deliveries
