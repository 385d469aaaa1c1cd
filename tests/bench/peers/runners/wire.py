"""How the benchmark talks with an engine in a process of its own: one JSON object a line, with the standard library alone.

The first line to the process says what to load; it answers with what it has loaded. Every further line holds requests
that are sent together; the answer has, for each, its tokens and the seconds from send to first and last token.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Setup:
    """What every engine is given: the same weights, the same number of threads, room for all requests at once."""

    gguf: str
    artifact: str
    huggingface: str
    num_threads: int
    num_requests: int
    max_tokens: int  # of the longest sequence


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how many tokens are wanted, whatever they are."""

    prompt: list[int]
    num_tokens: int


@dataclass(slots=True)
class Reply:
    """The tokens, and when the first and the last came, in seconds since all were sent."""

    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, token_ids: Sequence[int], at_s: float) -> None:
        """More tokens."""
        if not self.token_ids:
            self.first_s = at_s
        self.token_ids += token_ids
        self.last_s = at_s


class Engine(Protocol):
    """An engine that was loaded."""

    about: str

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """Answer all, greedily, each with exactly as many tokens as it wants."""


def serve(load: Callable[[Setup], Engine]) -> None:
    """Load, then answer until the input ends. What libraries print goes to the standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine = load(Setup(**json.loads(sys.stdin.readline())))
    _send(out, {"about": engine.about})
    for line in sys.stdin:
        requests = [Request(**each) for each in json.loads(line)]
        _send(out, [asdict(reply) for reply in engine.run(requests)])
    # Some libraries hang in their own ends; there is nothing left to lose.
    sys.stderr.flush()
    os._exit(0)


def _send(out: Any, message: Any) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
