"""A delivered request in a slot's hands: what is known of it, its next row, and what may run beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.engine.request import StepOutput
from inference.protocol import Failure, Finished, SamplingParams, TokenRow
from inference.queue import Delivery

MAX_ATTEMPTS = 3  # a request that was running at this many crashes is not tried again
SUSPECTS_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class Ticket:
    """A delivered request in this slot, until its end is written to Redis."""

    delivery: Delivery
    arrived_at: float
    deadline_at: float
    prompt_token_ids: Sequence[int] = ()
    sampling: SamplingParams | None = None
    is_running: bool = False
    is_over: bool = False
    next_seq: int = 0
    first_token_at: float = 0.0

    @property
    def id(self) -> str:
        """The request's id."""
        return self.delivery.entry.id

    @property
    def attempt(self) -> int:
        """How often the request was delivered; above 1 it is a suspect of a crash."""
        return self.delivery.attempt

    def advance(self, output: StepOutput, now: float) -> TokenRow:
        """The row of the next token; the last one tells what the request used and where its time went."""
        if output.index == 0:
            self.first_token_at = now
        self.next_seq = output.index + 1
        finish = None
        if output.finish_reason is not None:
            finish = Finished(
                output.finish_reason,
                output.num_prompt_tokens,
                output.num_output_tokens,
                queue_s=max(0.0, output.started_at - self.arrived_at),
                first_token_s=max(0.0, self.first_token_at - self.arrived_at),
                total_s=max(0.0, now - self.arrived_at),
            )
        return TokenRow(self.id, self.attempt, output.index, output.text, finish)

    def fail(self, failure: Failure) -> TokenRow:
        """The last row of a request that has no answer."""
        return TokenRow(self.id, self.attempt, self.next_seq, "", failure=failure)


def may_join(running: Sequence[Ticket], ticket: Ticket) -> bool:
    """On its last attempt a request runs alone; until the engine is empty for it, nothing else may start."""
    return not running or max(each.attempt for each in (*running, ticket)) < MAX_ATTEMPTS
