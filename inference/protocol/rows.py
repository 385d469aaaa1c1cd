"""What is answered: rows of tokens, framed per engine step and gateway."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from inference.protocol.sampling import FinishReason
from inference.protocol.text import dumps, known_fields, without_defaults

# What a gateway of the last release does not know goes only where it says something.
_NEW_FIELDS: Mapping[str, Any] = {"engine_s": 0.0, "cached_tokens": 0, "score": None}
# Finish, failure, choice and logprob of a row that has none.
_END_VALUES: tuple[Any, ...] = (None, None, 0, None)


@dataclass(frozen=True, slots=True)
class Score:
    """How probable a version finds an answer that another one gave: a natural logarithm for each of its tokens.

    ``num_agreed`` of them are the version's own best token in their place.
    """

    logprobs: tuple[float, ...]
    num_agreed: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and the same of the best ones in its place, best first.

    The token chosen need not be among the best. A token is its bytes as text; bytes that are no whole character alone
    are lone surrogates, as Python's ``surrogateescape`` has them, so that ``to_bytes`` gives every token back.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def to_bytes(token: str) -> bytes:
        """The bytes of ``token``."""
        return token.encode("utf-8", "surrogateescape")

    @staticmethod
    def to_token(data: bytes) -> str:
        """The token of these bytes."""
        return data.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole answer: why it ended, what it used, and where the time went (seconds, slot's clock).

    ``queue_s`` runs from arrival to the first step that computed a token of the request, ``first_token_s`` from
    arrival to the first output token, ``total_s`` from arrival to the last. ``engine_s`` is the request's share of the
    steps it took part in; ``cached_tokens`` are those of the prompt that a prefix cache had already. Of a text that
    was only scored, ``score`` is set and ``completion_tokens`` counts its tokens.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float
    engine_s: float = 0.0
    cached_tokens: int = 0
    score: Score | None = None


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
    """One output token of one choice of a request; ``text`` is empty while a character is incomplete.

    ``seq`` counts within the choice. ``logprob`` is set where it was asked for and the token has a text. It comes with
    its token, the text perhaps some rows later, or never when a stop string cuts it off. Row -1 is no token: it announces an attempt under the fingerprint that will compute it, before there is a token.
    """

    request_id: str
    attempt: int
    seq: int
    text: str
    finish: Finished | None = None
    failure: Failure | None = None
    choice: int = 0
    logprob: TokenLogprob | None = None

    @property
    def is_last(self) -> bool:
        """Whether no row of its choice follows."""
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
        rows = [_row_to_list(row) for row in self.rows]
        return dumps([self.slot, self.version, self.fingerprint, rows])

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        slot, version, fingerprint, rows = json.loads(text)
        return cls(slot, version, fingerprint, tuple(_row_from_list(row) for row in rows))


def _row_to_list(row: TokenRow) -> list[Any]:
    """Without the end of the list where it says nothing: four values in the middle of a plain answer, six at its end."""
    start = [row.request_id, row.attempt, row.seq, row.text]
    if row.choice or row.logprob is not None:
        end = [*_end_to_list(row), row.choice]
        return [*start, *end] if row.logprob is None else [*start, *end, _to_list(row.logprob)]
    return [*start, *_end_to_list(row)] if row.is_last else start


def _end_to_list(row: TokenRow) -> list[Any]:
    finish = None if row.finish is None else without_defaults(asdict(row.finish), _NEW_FIELDS)
    return [finish, None if row.failure is None else asdict(row.failure)]


def _to_list(logprob: TokenLogprob) -> list[Any]:
    top = [[_token_to_json(token), value] for token, value in logprob.top]
    return [_token_to_json(logprob.token), logprob.logprob, top]


def _token_to_json(token: str) -> str | list[int]:
    """Text as it is, and as numbers what no text can hold: half a character is no valid Unicode."""
    data = TokenLogprob.to_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _row_from_list(row: list[Any]) -> TokenRow:
    request_id, attempt, seq, text, *end = row
    finish, failure, choice, logprob = [*end, *_END_VALUES[len(end) :]]
    return TokenRow(
        request_id,
        attempt,
        seq,
        text,
        None if finish is None else _finished_from_dict(finish),
        None if failure is None else Failure(**known_fields(Failure, failure)),
        choice,
        None if logprob is None else _logprob_from_list(logprob),
    )


def _finished_from_dict(data: dict[str, Any]) -> Finished:
    reason, score = FinishReason(data.pop("reason")), data.pop("score", None)
    if score is not None:
        score = Score(tuple(score["logprobs"]), score["num_agreed"])
    known = known_fields(Finished, data)
    return Finished(reason, **known, score=score)


def _logprob_from_list(values: list[Any]) -> TokenLogprob:
    token, logprob, top = values
    best = tuple((_token_from_json(each), value) for each, value in top)
    return TokenLogprob(_token_from_json(token), logprob, best)


def _token_from_json(token: str | list[int]) -> str:
    return token if isinstance(token, str) else TokenLogprob.to_token(bytes(token))
