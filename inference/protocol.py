"""The messages between gateways and engine slots: plain values, JSON both ways.

Every name that crosses Redis is defined here once. A slot answers a request with *rows*, numbered from 0
without gaps: row ``seq`` belongs to output token ``seq``, and the last row carries ``finish`` or ``failure``.
A request that is run again after a crash sends the same numbers under a higher ``attempt``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 64
MAX_LOGIT_BIAS = 300
DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # by a version


class InvalidParameter(ValueError):
    """A sampling parameter out of range; ``name`` is the one to mend."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class FinishReason(StrEnum):
    """Why a request produced its last token."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    ``max_tokens`` None means: as many as the context has room for. ``top_k`` 0 and ``min_p`` 0 are off.
    ``seed`` None draws a fresh one per request. ``presence_penalty`` and ``frequency_penalty`` count output
    tokens, ``repetition_penalty`` prompt and output.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_is_open=True)
        self._check_stop()
        self._check_logit_bias()

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter(
                "stop", f"stop has {len(self.stop)} strings; send at most {MAX_STOP_STRINGS}."
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidParameter(
                    "stop",
                    f"a stop string has {len(text)} characters; send 1 to {MAX_STOP_LENGTH}.",
                )

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter(
                "logit_bias",
                f"logit_bias has {len(self.logit_bias)} tokens; send at most {MAX_LOGIT_BIAS}.",
            )
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise InvalidParameter("logit_bias", f"logit_bias token {token_id} is negative.")
            _check_range("logit_bias", bias, -100.0, 100.0)


def _check_range(
    name: str, value: float, low: float, high: float, *, low_is_open: bool = False
) -> None:
    inside = low < value <= high if low_is_open else low <= value <= high
    if not math.isfinite(value) or not inside:
        bound = "greater than" if low_is_open else "at least"
        raise InvalidParameter(
            name, f"{name}={value} is out of range; it must be {bound} {low} and at most {high}."
        )


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

    def to_json(self) -> str:
        """The body kept in ``req:{id}`` while the request lives."""
        return _dumps(asdict(self))

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
    queues it has been moved from; generation and arm stay as they were when it came.
    """

    id: str
    gateway: str
    arrival_ms: int
    deadline_ms: int
    generation: int
    arm: str
    attempt: int = 0

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
        )

    def count_attempts(self, deliveries: int) -> int:
        """How often it was delivered in all, after so many times in its present queue.

        Of a suspect from another queue the first delivery does not count: it is its way to those who take few.
        """
        return self.attempt + deliveries - 1 if self.attempt else deliveries


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
        return _dumps([self.slot, self.version, self.fingerprint, rows])

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


@dataclass(frozen=True, slots=True)
class Route:
    """Where the requests of an endpoint go: the whole state, so that applying it twice changes nothing.

    Versions are named ``model/number``. ``generation`` rises with every change within one ``incarnation`` of the
    endpoint. ``canary_bp`` of 10,000 sticky buckets go to the candidate.
    """

    endpoint: str
    incarnation: str
    generation: int
    live: str
    previous: str = ""
    candidate: str = ""
    canary_bp: int = 0
    salt: str = ""
    queue_cap: int = 256
    deadline_s: float = 300.0
    store_texts: bool = False

    def to_json(self) -> str:
        """What is published to Redis."""
        return _dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Resident:
    """A version that some slot should hold, with all that a slot needs to load it.

    ``role`` is ``live``, ``previous``, ``candidate`` or ``retired``. It says how much memory the version is given and
    who yields when slots are short; it decides no answer, so a change of role alone never loads anything again.
    """

    endpoint: str
    version: str
    artifact: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    role: str = "live"

    def is_same_load(self, other: Resident) -> bool:
        """Whether a slot that loaded ``other`` holds this one too."""
        return replace(self, role=other.role) == other


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
        return _dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        return cls(**json.loads(text))


def _as_dict(value: Finished | Failure | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
