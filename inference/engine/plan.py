"""What one step does: blocks that are moved, then tokens that are computed. All that crosses from scheduler to runner."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from inference.engine.request import Request


class MoveKind(StrEnum):
    """What a move connects."""

    COPY = "block to block"
    SWAP_OUT = "block to slot"
    SWAP_IN = "slot to block"


@dataclass(frozen=True, slots=True)
class Move:
    """One block's keys and values of all layers, to be copied before the next forward pass."""

    kind: MoveKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """``num_tokens`` tokens of one request from position ``start``; the last row of a sequence ``samples``."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    epoch: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the request was preempted or ended after the row was planned."""
        return self.epoch != self.request.epoch


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, at most one per request: all that crosses to the runner.

    ``moves`` come before the rows, in their order. Whoever makes one takes it out, so that each is made once, whatever
    happens to the step: what is left comes with the next plan again.
    """

    rows: tuple[PlannedRow, ...]
    moves: deque[Move] = field(default_factory=deque)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_tokens for row in self.rows)
