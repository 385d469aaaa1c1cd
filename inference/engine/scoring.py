"""How probable the model finds an answer that is there already: a prompt computed as any other, and no token chosen.

An answer of ``n`` tokens is scored by a request whose prompt is the real prompt and the answer without its last token,
and whose one output token is that last one, whatever the model would say. So scheduling, chunks, preemption and limits
are those of every request. The logits of the last ``n`` positions tell the score. They are computed a few rows at a
time, so that memory does not grow with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from inference.engine.logprobs import log_normalizer, logprob_of, to_numpy
from inference.engine.plan import PlannedRow, StepPlan
from inference.engine.request import Request, StepOutput
from inference.engine.sampler import Row
from inference.protocol import FinishReason, SamplingParams, Score

MAX_ROWS = 32
"""Logits in memory at once: 32 rows of a vocabulary of 128k are 16 MiB."""

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def scoring_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    answer: Sequence[int],
    *,
    cache_salt: str = "",
) -> Request:
    """A request that scores ``answer``, which has at least one token, behind the prompt."""
    request = Request.from_prompt(request_id, [*prompt_token_ids, *answer[:-1]], _SAMPLING)
    request.cache_salt = cache_salt
    request.first_logit = len(prompt_token_ids) - 1
    return request


class ComputesRows(Protocol):
    """What is needed of a runner."""

    def compute(self, rows: Sequence[PlannedRow], logit_rows: Sequence[int]) -> Tensor:
        """Compute ``rows``; float32 logits ``[num_logit_rows, vocab_size]`` of some of their tokens."""


@dataclass(slots=True)
class _Scoring:
    """One answer, and what is known of its tokens. ``first`` is the position whose logits tell the first one."""

    first: int
    token_ids: Sequence[int]
    logprobs: dict[int, float] = field(default_factory=dict)
    agreed: set[int] = field(default_factory=set)

    def note(self, position: int, row: Row) -> None:
        """The logits of one position, perhaps once more after a preemption: then they are the same."""
        index = position - self.first
        best = int(row.argmax())
        if not np.isfinite(row[best]):  # as the sampler: such a row tells nothing
            return
        token_id = self.token_ids[index]
        self.logprobs[index] = logprob_of(row, token_id, log_normalizer(row))
        if best == token_id:
            self.agreed.add(index)

    @property
    def is_complete(self) -> bool:
        return len(self.logprobs) == len(self.token_ids)

    def score(self) -> Score:
        logprobs = [self.logprobs[index] for index in range(len(self.token_ids))]
        return Score(tuple(logprobs), len(self.agreed))


class Scorer:
    """The unfinished requests of one engine that are only scored."""

    def __init__(self, runner: ComputesRows) -> None:
        self._runner = runner
        self._scorings: dict[str, _Scoring] = {}

    def add(self, request: Request, answer: Sequence[int]) -> None:
        """Score ``answer`` by ``request``, which ``scoring_request`` made for it."""
        self._scorings[request.id] = _Scoring(request.first_logit or 0, tuple(answer))

    def forget(self, request_id: str) -> None:
        """The request has ended; one that is not here is fine."""
        self._scorings.pop(request_id, None)

    def take_out(self, plan: StepPlan) -> tuple[StepPlan, list[PlannedRow]]:
        """The plan without the rows that are only scored, and those rows."""
        scored = [row for row in plan.rows if row.request.id in self._scorings]
        if not scored:
            return plan, []
        others = tuple([row for row in plan.rows if row.request.id not in self._scorings])
        return replace(plan, rows=others), scored

    def compute(self, rows: Sequence[PlannedRow]) -> dict[str, int]:
        """Compute ``rows``, note what their logits tell, and return the token of each that samples: its answer's last.

        One whose logits cannot be trusted has no token.
        """
        for step in cut(rows, MAX_ROWS):
            self._compute_step(step)
        scorings = {row.request.id: self._scorings[row.request.id] for row in rows if row.samples}
        return {name: each.token_ids[-1] for name, each in scorings.items() if each.is_complete}

    def take_output(self, request: Request, started_at: float) -> StepOutput | None:
        """The one output of a request that has its token, and with it ends; None for one that is not only scored."""
        scoring = self._scorings.pop(request.id, None)
        if scoring is None:
            return None
        return StepOutput(
            request_id=request.request_id,
            index=0,
            token_id=request.tokens[-1],
            text="",
            finish_reason=FinishReason.STOP,
            failure=None,
            num_prompt_tokens=scoring.first + 1,
            num_output_tokens=len(scoring.token_ids),
            started_at=started_at,
            score=scoring.score(),
        )

    def _compute_step(self, rows: Sequence[PlannedRow]) -> None:
        asked: list[tuple[_Scoring, int]] = []
        logit_rows: list[int] = []
        offset = 0
        for row in rows:
            scoring = self._scorings[row.request.id]
            for position in range(max(row.start, scoring.first), row.start + row.num_tokens):
                asked.append((scoring, position))
                logit_rows.append(offset + position - row.start)
            offset += row.num_tokens
        logits = to_numpy(self._runner.compute(rows, logit_rows))
        for (scoring, position), logits_of_one in zip(asked, logits, strict=True):
            scoring.note(position, logits_of_one)


def cut(rows: Sequence[PlannedRow], most: int) -> list[list[PlannedRow]]:
    """The tokens of ``rows`` in order, as steps of at most ``most`` logits, a request at most once in each."""
    steps: list[list[PlannedRow]] = [[]]
    room = most
    for row in rows:
        start, end = row.start, row.start + row.num_tokens
        while start < end:
            first = max(start, row.request.first_logit or 0)
            stop = min(end, first + room)
            if stop > start:
                piece = replace(row, start=start, num_tokens=stop - start, samples=False)
                steps[-1].append(piece)
                room -= max(stop - first, 0)
                start = stop
            if start < end:
                steps.append([])
                room = most
    return [step for step in steps if step]
