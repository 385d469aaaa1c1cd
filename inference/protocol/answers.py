"""What two versions said to the same request: the halves of a pair, on their way to be compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from inference.protocol.rows import Score
from inference.protocol.text import dumps, known_fields

LIVE, SHADOW, SELF, SCORE, GOLDEN = "live", "shadow", "self", "score", "golden"
COPY_ARMS = (SHADOW, SELF, SCORE, GOLDEN)  # nobody waits for these
COPY_WAIT_S = 60.0  # a copy that no slot has started by then is dropped
COPY_RUN_S = 600.0  # no copy may run longer, whatever its request was allowed


def copy_id(request_id: str, arm: str) -> str:
    """The name that a copy of a request is queued under."""
    return f"{request_id}~{arm}"


@dataclass(frozen=True, slots=True)
class Answer:
    """One half of a pair, whole: what a version made of a request, or why there is nothing.

    ``arm`` ``live`` is the incumbent's half, written by the gateway; it carries the ``request`` as JSON, and names in
    ``awaits`` the arms whose halves are to come. The other halves are written by slots. ``copy_of`` is the request's id
    in both.

    ``outcome`` is ``ok``, ``cancelled``, or the code of a failure; where ``dropped`` says why, the copy was never
    dispatched or made way for requests, and nothing is known of its version. ``total_s`` runs from dispatch for a copy,
    from arrival for the incumbent. ``at`` is epoch seconds.
    """

    copy_of: str
    arm: str
    endpoint: str
    version: str
    generation: int
    rollout: str
    fingerprint: str
    outcome: str
    at: float
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    engine_s: float = 0.0
    total_s: float = 0.0
    score: Score | None = None
    dropped: str = ""
    request: str = ""
    awaits: tuple[str, ...] = ()
    store_texts: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether there is an answer."""
        return self.outcome == "ok"

    def to_json(self) -> str:
        """One entry of the ``answers`` stream."""
        return dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``, also of another release."""
        data = json.loads(text)
        known = known_fields(cls, data)
        known["awaits"] = tuple(known.get("awaits", ()))
        if (score := known.get("score")) is not None:
            known["score"] = Score(tuple(score["logprobs"]), int(score["num_agreed"]))
        return cls(**known)
