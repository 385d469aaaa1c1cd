"""A request inside the engine: its tokens, how far they are computed, and the blocks it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from inference.protocol import (
    DEFAULTABLE,
    Failure,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Score,
    TokenLogprob,
)


class RequestRefused(Exception):
    """A request that the engine will never run; ``failure`` is what the caller is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Status(StrEnum):
    """Where a request stands; nothing leaves the last two."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, from the moment it is accepted to its terminal status.

    ``tokens`` is the prompt and then the output; the KV of its first ``num_computed_tokens`` lies in the
    blocks of ``block_table``, position ``p`` in slot ``p % block_size`` of entry ``p // block_size``. ``epoch``
    rises whenever results that are still under way become worthless: on preemption and at the end.

    The scheduler alone changes a request; ``arrival`` and ``max_output_tokens`` are set when it is added.
    ``prompt_param`` names the caller's parameter to mend when the prompt is too long.

    ``cache_salt`` names those who may share the blocks of this prompt, ``chain`` what its full blocks hold, and the
    first ``num_kept_blocks`` of the table are the cached ones. While it is swapped out, what was computed lies in
    ``swap_slots``. A further ``choice`` of an answer shares the prompt of its ``parent``, the first choice.
    ``num_cached_tokens`` of the prompt were there when it was first admitted. From ``first_logit`` on, each position's
    logits are asked for, so that it must be computed even if its keys and values are there.
    """

    id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    prompt_param: str = "messages"
    arrival: int = 0
    max_output_tokens: int = 0
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    epoch: int = 0
    num_preemptions: int = 0
    cache_salt: str = ""
    choice: int = 0
    parent: Request | None = None
    first_logit: int | None = None
    chain: list[bytes] = field(default_factory=list)
    num_kept_blocks: int = 0
    swap_slots: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    @classmethod
    def from_prompt(
        cls, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> Self:
        """A request that has no output yet; the prompt is copied."""
        tokens = list(prompt_token_ids)
        return cls(request_id, tokens, len(tokens), sampling)

    @property
    def request_id(self) -> str:
        """The id under which whoever asked knows it; ``id`` is that of this one choice."""
        return self.id if self.parent is None else self.parent.id

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far; they survive a preemption."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """What the request wants of a step: 1 when it decodes, more while its KV is to be (re)computed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """How many leading tokens need not be computed where their KV is there; the last one always must."""
        last = len(self.tokens) - 1
        return last if self.first_logit is None else min(last, self.first_logit)

    @property
    def is_finished(self) -> bool:
        """Whether the request reached a terminal status, and therefore holds nothing."""
        return self.status in (Status.FINISHED, Status.ABORTED)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step adds to one request: a token, its text, and perhaps the end.

    ``index`` counts output tokens from 0. ``text`` may be empty while a character or a stop string is
    incomplete. ``logprob`` is set where it was asked for and the token has a text, be it incomplete. ``started_at`` is
    ``time.monotonic()`` of the first step that computed a token of the request. On the last one of an answer
    ``engine_s`` is its share of all its steps. An answer that was only scored has one output, with its ``score``; then
    ``num_output_tokens`` counts its tokens.
    """

    request_id: str
    index: int
    token_id: int
    text: str
    finish_reason: FinishReason | None
    failure: Failure | None
    num_prompt_tokens: int
    num_output_tokens: int
    started_at: float
    engine_s: float = 0.0
    num_cached_tokens: int = 0
    choice: int = 0
    logprob: TokenLogprob | None = None
    score: Score | None = None

    @property
    def is_last(self) -> bool:
        """Whether its choice ends with it."""
        return self.finish_reason is not None or self.failure is not None


def fill_sampling(request: GenerateRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling of ``request``, with a version's ``defaults`` where the caller left a parameter out.

    Raises:
        InvalidParameter: a default is out of range.
        TypeError: a default is no number.
    """
    names = [name for name in DEFAULTABLE if name in request.unset and name in defaults]
    return replace(request.sampling, **{name: defaults[name] for name in names})
