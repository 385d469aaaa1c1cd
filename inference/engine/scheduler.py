"""Who runs how many tokens in the next step, and who waits, gives way, or ends.

There are no phases. A step gives each request up to ``len(tokens) - num_computed_tokens`` tokens: a decoding
request wants 1, a new or preempted one wants its whole sequence and gets it in chunks. Order of claims: running
requests that want 1, then the other running ones, then waiting ones, always oldest first.

Everything unfinished stands in one line by arrival; the running requests are the head of that line. Admission and
preemption only move the cut, so no request overtakes another, and the oldest is never preempted and always advances.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from inference.config import InvalidConfig
from inference.engine.block_pool import BlockPool
from inference.engine.request import Request, RequestRefused, Status
from inference.protocol import Failure, FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold, and where a sequence ends.

    ``long_prefill_tokens`` caps the tokens of one request in one step, so that a long prompt neither stretches the
    step for those that decode nor takes the whole budget. ``max_model_len`` counts prompt and output.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "long_prefill_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)} must be at least 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running sequence can decode."
            )


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
    """The rows of one step, at most one per request: all that crosses to the runner."""

    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_tokens for row in self.rows)


class Scheduler:
    """Holds every unfinished request, and the block tables of the running ones.

    One thread calls it. A plan changes who runs and which blocks they hold, a commit what is computed: a plan that
    is never committed (its step failed) is simply made again.
    """

    def __init__(self, limits: SchedulerLimits, block_pool: BlockPool) -> None:
        self._limits = limits
        self._pool = block_pool
        # Both in arrival order, everything running older than everything waiting.
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._num_added = 0
        self._num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet, or nothing any more after a preemption."""
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Accepted requests without a terminal status: those running and those waiting."""
        return len(self._running) + len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its blocks back, since the start."""
        return self._num_preemptions

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and output together that can ever run here."""
        return min(self._limits.max_model_len, self._pool.num_slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting

    def add(self, request: Request) -> None:
        """Put a new request at the end of the line; from now on it reaches exactly one terminal status.

        Raises:
            RequestRefused: it can never fit the context or the pool; it was not accepted.
            ValueError: a request of the same id is unfinished.
        """
        if request.id in self:
            raise ValueError(f"Request {request.id} is already here; finish or abort it first.")
        request.max_output_tokens = self._resolve_max_tokens(request)
        self._num_added += 1
        request.arrival = self._num_added
        self._waiting[request.id] = request

    def plan(self) -> StepPlan:
        """The next step; it has a row whenever a request is unfinished. Blocks for all its rows are held.

        It has none, and everybody waits, while the pool is smaller than it may be and too small for the oldest.

        It may preempt: the youngest give their blocks back at once, and resume later with all their tokens.
        """
        rows: list[PlannedRow] = []
        budget = self._limits.max_num_batched_tokens
        for request in self._claims():
            num_tokens = min(
                request.num_uncomputed_tokens, self._limits.long_prefill_tokens, budget
            )
            samples = num_tokens == request.num_uncomputed_tokens
            start = request.num_computed_tokens
            rows.append(PlannedRow(request, start, num_tokens, samples, request.epoch))
            budget -= num_tokens
            if budget == 0:  # Asking for the next claim would admit a request that gets no token.
                break
        return StepPlan(tuple(rows))

    def commit(self, plan: StepPlan, token_ids: Mapping[str, int]) -> list[Request]:
        """Record that ``plan`` was computed, and which token each sampling row gave.

        Rows of requests that were aborted or finished after ``plan()`` are dropped.

        Returns:
            The requests that gained a token, in plan order; some may be finished by it.

        Raises:
            ValueError: the plan was committed before, or the token of a sampling row is missing.
        """
        rows = [row for row in plan.rows if not row.is_stale]
        for row in rows:
            _check_result(row, token_ids)
        for row in rows:
            row.request.num_computed_tokens += row.num_tokens
        sampled = [row.request for row in rows if row.samples]
        for request in sampled:
            self._append(request, token_ids[request.id])
        return sampled

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason found outside, such as a stop string; False if it is not here."""
        return self._end(request_id, Status.FINISHED, reason)

    def abort(self, request_id: str) -> bool:
        """End a request without an answer, whatever its state; False if it is not here."""
        return self._end(request_id, Status.ABORTED, None)

    def check_integrity(self) -> None:
        """Compare the block pool with the block tables; meant for idle moments and tests.

        Raises:
            BrokenPool: they disagree.
        """
        requests = [*self._running.values(), *self._waiting.values()]
        self._pool.check_integrity(request.block_table for request in requests)

    def _resolve_max_tokens(self, request: Request) -> int:
        num_prompt_tokens = request.num_prompt_tokens
        if num_prompt_tokens < 1:
            raise _refusal("empty_prompt", request.prompt_param, "The prompt has no tokens.")
        room = self.max_sequence_tokens - num_prompt_tokens
        asked = request.sampling.max_tokens
        if room < 1:
            raise _too_long(
                request.prompt_param,
                f"{request.prompt_param} has {num_prompt_tokens} tokens and the answer needs at least 1, "
                f"but {self._describe_limit()}. Shorten {request.prompt_param} by at least {1 - room} tokens.",
            )
        if asked is not None and asked > room:
            raise _too_long(
                "max_tokens",
                f"{request.prompt_param} has {num_prompt_tokens} tokens and max_tokens={asked}, "
                f"together {num_prompt_tokens + asked}, but {self._describe_limit()}. "
                f"Lower max_tokens to at most {room}, or shorten {request.prompt_param}.",
            )
        return room if asked is None else asked

    def _describe_limit(self) -> str:
        context = self._limits.max_model_len
        if context <= self._pool.num_slots:
            return f"the context holds {context}"
        return f"the KV cache of this engine holds {self._pool.num_slots} (the context {context})"

    def _claims(self) -> Iterator[Request]:
        """Running and newly admitted requests in the order of their claims, each with blocks for its tokens."""
        # Stable: arrival order among those that decode, and among those that are still being prefilled.
        running = sorted(self._running.values(), key=lambda each: each.num_uncomputed_tokens > 1)
        for request in running:
            if request.status is Status.RUNNING and self._grow(request):
                yield request
        # Whoever just gave its blocks away heads the line, and is not back at once: fewer are free than it needs.
        yield from self._admissions()

    def _grow(self, request: Request) -> bool:
        """Give ``request`` blocks for all its tokens, if need be those of the youngest; False if it is itself that.

        Only decoding requests grow here, since admission covers a whole sequence. So whoever gives way has no row
        in the step yet: it is younger, or still being prefilled. The oldest gives way only to a pool that is to grow.
        """
        missing = self._missing_blocks(request)
        while missing > self._pool.num_free:
            if self._preempt_youngest() is request:
                return False
        request.block_table.extend(self._pool.allocate(missing))
        return True

    def _admissions(self) -> Iterator[Request]:
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            request = next(iter(self._waiting.values()))
            if not self._has_room_for(request):
                return
            del self._waiting[request.id]
            self._running[request.id] = request
            request.status = Status.RUNNING
            request.block_table.extend(self._pool.allocate(self._missing_blocks(request)))
            yield request

    def _has_room_for(self, request: Request) -> bool:
        """Whether the whole sequence fits now, with a free block left for each running one and itself.

        Without that reserve, a request would be admitted into the last free blocks, lose them in the next steps
        to those that decode, and be computed again and again.
        """
        reserve = len(self._running) + 1 if self._running else 0
        return self._missing_blocks(request) + reserve <= self._pool.num_free

    def _missing_blocks(self, request: Request) -> int:
        return self._pool.blocks_for(len(request.tokens)) - len(request.block_table)

    def _preempt_youngest(self) -> Request:
        if len(self._running) == 1 and not self._pool.can_grow:
            raise RuntimeError("The oldest request does not fit the pool; it should not be here.")
        _, request = self._running.popitem()
        self._release(request)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)
        return request

    def _append(self, request: Request, token_id: int) -> None:
        request.tokens.append(token_id)
        if token_id in self._limits.eos_token_ids and not request.sampling.ignore_eos:
            self.finish(request.id, FinishReason.STOP)
        elif request.num_output_tokens == request.max_output_tokens:
            self.finish(request.id, FinishReason.LENGTH)

    def _end(self, request_id: str, status: Status, reason: FinishReason | None) -> bool:
        request = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        if request is None:
            return False
        self._release(request)
        request.status = status
        request.finish_reason = reason
        return True

    def _release(self, request: Request) -> None:
        """Take the blocks back, free in the same step, and make results that are under way worthless."""
        self._pool.release(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
        request.epoch += 1


def _check_result(row: PlannedRow, token_ids: Mapping[str, int]) -> None:
    if row.start != row.request.num_computed_tokens:
        raise ValueError(
            f"Request {row.request.id} is computed up to {row.request.num_computed_tokens}, the plan starts "
            f"at {row.start}; commit each plan once, before the next."
        )
    if row.samples and row.request.id not in token_ids:
        raise ValueError(
            f"Request {row.request.id} has no token; abort it before the commit if it failed."
        )


def _too_long(param: str, message: str) -> RequestRefused:
    return _refusal("context_length_exceeded", param, message)


def _refusal(code: str, param: str, message: str) -> RequestRefused:
    return RequestRefused(Failure(code, message, HTTPStatus.BAD_REQUEST, param))
