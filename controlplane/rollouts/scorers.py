"""Who says which of two answers is better: a function of ours, or a judge behind HTTP. Neither learns which arm is which."""

from __future__ import annotations

import math
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from controlplane.errors import DomainError

PAUSES_S = (0.2, 0.8)
MAX_REPLY_BYTES = 65_536


class InvalidScorer(DomainError):
    """The setting names no scorer."""

    code = "invalid_scorer"


class ScorerFailed(Exception):
    """The scorer gave no number from -1 to 1, now or after some tries."""


@dataclass(frozen=True, slots=True)
class Question:
    """Two answers to a prompt, in an order that says nothing. ``id`` is opaque, and the same for the same pair."""

    id: str
    prompt: str
    answer_a: str
    answer_b: str


class Scorer(Protocol):
    """Says which answer is better."""

    name: str

    def prefer(self, question: Question) -> float:
        """From -1, ``answer_a`` is better, to 1, ``answer_b`` is. Raises ``ScorerFailed``."""


class FunctionScorer:
    """A function ``(prompt, answer_a, answer_b) -> number`` of a module that this process can import."""

    def __init__(self, path: str) -> None:
        try:
            self._function: Callable[[str, str, str], float] = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidScorer(
                f"TATKAL_SCORER={path!r} cannot be imported ({error}); name it module:function."
            ) from error
        if not callable(self._function):
            raise InvalidScorer(f"TATKAL_SCORER={path!r} is no function; name it module:function.")
        self.name = path

    def prefer(self, question: Question) -> float:
        """What the function says."""
        try:
            return _checked(self._function(question.prompt, question.answer_a, question.answer_b))
        except ScorerFailed:
            raise
        except Exception as error:  # whatever it was, the next pair is scored
            raise ScorerFailed(f"{self.name} raised {error!r}") from error


class HttpJudge:
    """A service that is sent ``{id, prompt, answer_a, answer_b}`` and replies ``{"preference": -1..1}``."""

    def __init__(self, url: str, *, token: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidScorer(f"TATKAL_SCORER={url!r} must be an http or https address.")
        self.name = f"{parts.scheme}://{parts.hostname}{parts.path}"  # nothing secret
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._url = url
        self._client = httpx.Client(timeout=timeout_s, headers=headers, follow_redirects=False)

    def prefer(self, question: Question) -> float:
        """What the judge says; a judge that is away or busy is asked again."""
        body = {
            "id": question.id,
            "prompt": question.prompt,
            "answer_a": question.answer_a,
            "answer_b": question.answer_b,
        }
        for pause_s in (*PAUSES_S, None):
            try:
                return self._ask(body)
            except _TryAgain as error:
                if pause_s is None:
                    raise ScorerFailed(f"{self.name}: {error}") from error
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _ask(self, body: dict[str, str]) -> float:
        try:
            reply = self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise _TryAgain(repr(error)) from error
        if reply.status_code >= 500 or reply.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            raise _TryAgain(f"status {reply.status_code}")
        if reply.status_code != HTTPStatus.OK or len(reply.content) > MAX_REPLY_BYTES:
            raise ScorerFailed(f"{self.name}: status {reply.status_code}")
        try:
            return _checked(reply.json()["preference"])
        except (ValueError, KeyError, TypeError) as error:
            raise ScorerFailed(f"{self.name}: the reply has no preference") from error


class _TryAgain(Exception):
    """The judge did not answer this time."""


def load_scorer(spec: str, *, token: str = "", timeout_s: float = 10.0) -> Scorer | None:
    """The scorer that the setting names: ``module:function``, an address, or none.

    Raises:
        InvalidScorer: it names something else.
    """
    if not spec:
        return None
    if spec.startswith(("http://", "https://")):
        return HttpJudge(spec, token=token, timeout_s=timeout_s)
    return FunctionScorer(spec)


def is_turned(pair_id: str) -> bool:
    """Whether the incumbent's answer is shown second: by the pair alone, so that a repeat asks the same."""
    return blake2b(pair_id.encode(), digest_size=1, key=b"order").digest()[0] % 2 == 1


def ask(scorer: Scorer, *, pair_id: str, prompt: str, incumbent: str, candidate: str) -> float:
    """From -1, the incumbent's answer is better, to 1, the candidate's is.

    Raises:
        ScorerFailed: there is no such number.
    """
    name = blake2b(pair_id.encode(), digest_size=12, key=b"name").hexdigest()
    first, second = (candidate, incumbent) if is_turned(pair_id) else (incumbent, candidate)
    preference = scorer.prefer(Question(name, prompt, first, second))
    return -preference if is_turned(pair_id) else preference


def _checked(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not -1 <= value <= 1:
        raise ScorerFailed(f"preference={value!r} is no number from -1 to 1")
    return float(value)
