"""Where requests go, and which versions slots hold: the state that the control plane publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from inference.protocol.text import dumps, known_fields


@dataclass(frozen=True, slots=True)
class Route:
    """Where the requests of an endpoint go: the whole state, so that applying it twice changes nothing.

    Versions are named ``model/number``. ``generation`` rises with every change within one ``incarnation`` of the
    endpoint. ``canary_bp`` of 10,000 sticky buckets go to the candidate. While a ``rollout`` (its id, and then the salt of
    the buckets as well) holds the candidate, ``shadow_bp`` of 10,000 requests are copied to it, ``self_bp`` are answered
    by the live version a second time, and the answers of ``score_bp`` are given to the candidate to be scored.
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
    rollout: str = ""
    shadow_bp: int = 0
    self_bp: int = 0
    score_bp: int = 0

    def to_json(self) -> str:
        """What is published to Redis."""
        return dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``, also of another release."""
        return cls(**known_fields(cls, json.loads(text)))


@dataclass(frozen=True, slots=True)
class Resident:
    """A version that some slot should hold, with all that a slot needs to load it.

    ``role`` is ``live``, ``previous``, ``candidate`` or ``retired``. It says how much memory the version is given and
    who yields when slots are short; it decides no answer, so a change of role alone never loads anything again.
    ``runtime`` is the directory of the virtual environment that it runs under, empty for the slot's own, and
    ``runtime_digest`` what was installed there when the version was registered.
    """

    endpoint: str
    version: str
    artifact: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    role: str = "live"
    runtime: str = ""
    runtime_digest: str = ""

    def is_same_load(self, other: Resident) -> bool:
        """Whether a slot that loaded ``other`` holds this one too."""
        return replace(self, role=other.role) == other
