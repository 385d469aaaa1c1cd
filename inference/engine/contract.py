"""What a slot needs of an engine, so that tests may put another one in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from inference.engine.memory import Usage
from inference.engine.request import StepOutput
from inference.protocol import GenerateRequest, SamplingParams


class Engine(Protocol):
    """An engine; but for what says otherwise it is used by one thread alone."""

    @property
    def fingerprint(self) -> str:
        """Names the numerics: equal fingerprints give equal tokens for equal requests."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """The version's sampling for parameters that a request leaves out; from any thread."""

    @property
    def kernel(self) -> str:
        """What computes a step, for people."""

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do."""

    def room(self) -> int:
        """How many more requests it would take now."""

    def usage(self) -> Usage:
        """What it holds now; from any thread."""

    def encode(self, request: GenerateRequest) -> tuple[int, ...]:
        """The prompt's tokens; from any thread. Raises ``RequestRefused``."""

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """The tokens of an answer behind its prompt; from any thread."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        n: int = 1,
        cache_salt: str = "",
        scored_token_ids: Sequence[int] = (),
    ) -> None:
        """Accept a request. Raises ``RequestRefused`` if it can never run."""

    def abort(self, request_id: str) -> bool:
        """Forget a request and free what it holds, in any state; False if it is not there."""

    def step(self) -> list[StepOutput]:
        """Compute one step."""
