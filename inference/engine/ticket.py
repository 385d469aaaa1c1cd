"""A delivered request in a slot's hands: what is known of it, its next row, and what may run beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.engine.request import StepOutput
from inference.protocol import (
    Failure,
    Finished,
    FinishReason,
    SamplingParams,
    Score,
    TokenRow,
)
from inference.queue import Delivery

MAX_ATTEMPTS = 3  # a request that was running at this many crashes is not tried again
SUSPECTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of the engine, in the engine's terms: ``n`` answers to the prompt.

    With ``scored_token_ids`` it is one answer that is there already and is to be scored, be it empty.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    cache_salt: str = ""
    scored_token_ids: Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """A delivered request in this slot, until its end is written to Redis.

    The rows of each choice have numbers of their own; the request is answered when every choice has ended.
    """

    delivery: Delivery
    arrived_at: float
    deadline_at: float
    work: Work | None = None
    is_running: bool = False
    is_over: bool = False
    next_seqs: dict[int, int] = field(default_factory=dict)
    num_ended: int = 0
    first_token_at: float = 0.0

    @property
    def id(self) -> str:
        """The request's id."""
        return self.delivery.entry.id

    @property
    def attempt(self) -> int:
        """How often the request was delivered; above 1 it is a suspect of a crash."""
        return self.delivery.attempt

    @property
    def has_rows(self) -> bool:
        """Whether whoever asked has seen, or is about to see, a token."""
        return bool(self.next_seqs)

    @property
    def num_rows(self) -> int:
        """Tokens of all choices so far."""
        return sum(self.next_seqs.values())

    @property
    def is_answered(self) -> bool:
        """Whether every choice has ended."""
        return self.work is not None and self.num_ended == self.work.n

    def advance(self, output: StepOutput, now: float) -> TokenRow:
        """The row of a choice's next token; its last one tells what the choice used and where the time went."""
        if not self.has_rows:
            self.first_token_at = now
        self.next_seqs[output.choice] = output.index + 1
        finish = None
        if output.finish_reason is not None:
            self.num_ended += 1
            finish = Finished(
                output.finish_reason,
                output.num_prompt_tokens,
                output.num_output_tokens,
                queue_s=max(0.0, output.started_at - self.arrived_at),
                first_token_s=max(0.0, self.first_token_at - self.arrived_at),
                total_s=max(0.0, now - self.arrived_at),
                engine_s=output.engine_s,
                cached_tokens=output.num_cached_tokens,
                score=output.score,
            )
        return TokenRow(
            self.id,
            self.attempt,
            output.index,
            output.text,
            finish,
            choice=output.choice,
            logprob=output.logprob,
        )

    def finish_unscored(self, now: float) -> TokenRow:
        """The only row of a request whose answer has no token to score."""
        self.num_ended += 1
        prompt_tokens = len(self.work.prompt_token_ids) if self.work else 0
        waited = max(0.0, now - self.arrived_at)
        finish = Finished(
            FinishReason.STOP, prompt_tokens, 0, waited, waited, waited, score=Score((), 0)
        )
        return TokenRow(self.id, self.attempt, 0, "", finish)

    def fail(self, failure: Failure) -> TokenRow:
        """The last row of a request that has no answer."""
        return TokenRow(self.id, self.attempt, self.next_seqs.get(0, 0), "", failure=failure)


def may_join(running: Sequence[Ticket], ticket: Ticket) -> bool:
    """On its last attempt a request runs alone; until the engine is empty for it, nothing else may start."""
    return not running or max(each.attempt for each in (*running, ticket)) < MAX_ATTEMPTS
