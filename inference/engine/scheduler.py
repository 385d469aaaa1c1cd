"""Who runs how many tokens in the next step, and who waits, gives way, or ends.

There are no phases. A step gives each request up to ``len(tokens) - num_computed_tokens`` tokens: a decoding
request wants 1, a new or preempted one wants its whole sequence and gets it in chunks. Order of claims: running
requests that want 1, then the other running ones, then waiting ones, always oldest first.

Everything unfinished stands in one line by arrival; the running requests are the head of that line. Admission and
preemption only move the cut, so no request overtakes another, and the oldest is never preempted and always advances.

What was computed is used again: a request starts behind the cached blocks that begin like it, a further choice behind
the prompt of the first, and one that was swapped out where it stood.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from inference.engine.block_pool import BlockPool
from inference.engine.limits import SchedulerLimits, resolve_max_tokens
from inference.engine.plan import Move, MoveKind, PlannedRow, StepPlan
from inference.engine.prefix_cache import extend_chain, start_chain
from inference.engine.request import Request, Status
from inference.engine.start import Start, find_start
from inference.engine.swap import PreemptionCosts, SwapSpace
from inference.planner.memory import can_admit
from inference.protocol import FinishReason


class Scheduler:
    """Holds every unfinished request, and the block tables of the running ones.

    One thread calls it. A plan changes who runs and which blocks they hold, a commit what is computed: a plan that
    is never committed (its step failed) is simply made again.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        block_pool: BlockPool,
        *,
        version: str | None = None,
        costs: PreemptionCosts | None = None,
    ) -> None:
        """``version`` names what computes the blocks, for the root of the prefix cache; None: nothing is cached."""
        self._limits = limits
        self._pool = block_pool
        self._version = version
        self._moves: deque[Move] = deque()
        self.swap = SwapSpace()
        self.costs = costs or PreemptionCosts()
        # Both in arrival order, everything running older than everything waiting.
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._num_added = 0
        self._num_preemptions = 0
        self._num_swaps = 0

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
    def num_swaps(self) -> int:
        """How many of them kept what was computed in swap space."""
        return self._num_swaps

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
        if self._version is not None:
            request.chain = start_chain(self._version, request.cache_salt)
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
        for request in self._claims(rows):
            wanted = request.num_uncomputed_tokens
            num_tokens = min(wanted, self._limits.long_prefill_tokens, budget)
            samples = num_tokens == wanted
            start = request.num_computed_tokens
            rows.append(PlannedRow(request, start, num_tokens, samples, request.epoch))
            budget -= num_tokens
            if budget == 0:  # Asking for the next claim would admit a request that gets no token.
                break
        return StepPlan(tuple(rows), self._moves)

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
            request = row.request
            request.num_computed_tokens += row.num_tokens
            if request.num_computed_tokens // self._pool.block_size > request.num_kept_blocks:
                self._keep(request)
        sampled = [row.request for row in rows if row.samples]
        for request in sampled:
            self._append(request, token_ids[request.id])
        return sampled

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason found outside, such as a stop string; False if it is not here."""
        return self._end(request_id, Status.FINISHED, reason)

    def abort(self, request_id: str, *, is_broken: bool = False) -> bool:
        """End a request without an answer, whatever its state; False if it is not here.

        Nobody begins behind the blocks of one that ``is_broken``.
        """
        if is_broken and request_id in self._running:
            self._pool.forget(self._running[request_id].block_table)
        return self._end(request_id, Status.ABORTED, None)

    def check_integrity(self) -> None:
        """Compare block pool and swap space with those who hold some; meant for idle moments and tests.

        Raises:
            RuntimeError: they disagree.
        """
        requests = [*self._running.values(), *self._waiting.values()]
        self._pool.check_integrity(request.block_table for request in requests)
        self.swap.check_integrity(request.swap_slots for request in requests)

    def _resolve_max_tokens(self, request: Request) -> int:
        return resolve_max_tokens(request, self._limits, self._pool.num_slots)

    def _claims(self, rows: list[PlannedRow]) -> Iterator[Request]:
        """Running and newly admitted requests in the order of their claims, each with blocks for its tokens.

        ``rows`` are those that the claims before led to.
        """
        # Stable: arrival order among those that decode, and among those that are still being prefilled.
        running = sorted(self._running.values(), key=lambda each: each.num_uncomputed_tokens > 1)
        for request in running:
            if request.status is Status.RUNNING and self._grow(request):
                yield request
        # Whoever just gave its blocks away heads the line, and is not back at once: fewer are free than it needs.
        yield from self._admissions(rows)

    def _grow(self, request: Request) -> bool:
        """Give ``request`` blocks for all its tokens, if need be those of the youngest; False if it is itself that.

        Only decoding requests grow here, since admission covers a whole sequence. So whoever gives way has no row
        in the step yet: it is younger, or still being prefilled. The oldest gives way only to a pool that is to grow.
        """
        if self._has_its_blocks(request):
            return True
        while self._missing_blocks(request) > self._pool.num_free:
            if self._preempt_youngest() is request:
                return False
        self._take_blocks(request)
        return True

    def _admissions(self, rows: list[PlannedRow]) -> Iterator[Request]:
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            request = next(iter(self._waiting.values()))
            start = find_start(request, self._pool)
            if self._awaits_another(request, start, rows) or not self._has_room_for(request, start):
                return
            del self._waiting[request.id]
            self._running[request.id] = request
            self._admit(request, start)
            yield request

    def _awaits_another(self, request: Request, start: Start, rows: list[PlannedRow]) -> bool:
        """Whether ``request`` would compute what an older one, which runs, is just computing: then it waits for it.

        That is the prompt of its first choice, or a good number of blocks that it begins with.
        """
        parent = request.parent
        if parent is not None and parent.status is Status.RUNNING:
            return parent.num_computed_tokens < parent.num_prompt_tokens
        size = self._pool.block_size
        first = start.num_tokens // size
        last = first + self._pool.blocks_for(self._limits.worth_waiting_tokens)
        # Equal digests of one block mean that all before it are equal too.
        wanted = request.chain[last : last + 1]
        return bool(wanted) and any(
            each.request.chain[last : last + 1] == wanted
            for each in rows
            if each.num_tokens > 1 and each.start // size <= first
        )

    def _has_room_for(self, request: Request, start: Start) -> bool:
        """Whether the whole sequence fits now, with a free block left for each running one and itself.

        Without that reserve, a request would be admitted into the last free blocks, lose them in the next steps
        to those that decode, and be computed again and again.
        """
        pool = self._pool
        # Idle blocks count as free until they are used again; a block that is written to in part is copied.
        num_held = sum(not pool.cache.is_idle(block_id) for block_id in start.blocks)
        num_copied = start.num_tokens % pool.block_size > 0
        missing = pool.blocks_for(len(request.tokens)) - num_held + num_copied
        return can_admit(missing, num_free=pool.num_free, num_running=len(self._running))

    def _admit(self, request: Request, start: Start) -> None:
        """Have ``request`` begin at ``start``, or where it was swapped out, whichever is further."""
        self._pool.reuse(start.blocks)
        request.block_table = list(start.blocks)
        request.num_kept_blocks = start.num_kept
        if request.status is Status.WAITING and request.choice == 0:
            request.num_cached_tokens = start.num_tokens
        request.num_computed_tokens = max(request.num_computed_tokens, start.num_tokens)
        request.status = Status.RUNNING
        self._take_blocks(request)
        if request.swap_slots:
            self._swap_in(request, len(start.blocks))

    def _take_blocks(self, request: Request) -> None:
        """Have ``request`` hold blocks for all its tokens, and alone the one that it writes to next."""
        table, index = request.block_table, self._shared_index(request)
        if index is not None:
            [own] = self._pool.allocate(1)
            self._moves.append(Move(MoveKind.COPY, table[index], own))
            self._pool.release([table[index]])
            table[index] = own
        table.extend(self._pool.allocate(self._missing_blocks(request)))

    def _has_its_blocks(self, request: Request) -> bool:
        """Whether nothing is missing, as in nearly every step of a request that decodes."""
        table, size = request.block_table, self._pool.block_size
        if len(request.tokens) > len(table) * size:
            return False
        return not self._pool.is_shared(table[request.num_computed_tokens // size])

    def _missing_blocks(self, request: Request) -> int:
        missing = self._pool.blocks_for(len(request.tokens)) - len(request.block_table)
        return missing + (self._shared_index(request) is not None)

    def _shared_index(self, request: Request) -> int | None:
        """Where in the table the next token is written to a block that others read; None if it is not."""
        index = request.num_computed_tokens // self._pool.block_size
        table = request.block_table
        return index if index < len(table) and self._pool.is_shared(table[index]) else None

    def _keep(self, request: Request) -> None:
        """Cache the blocks that ``request`` has filled.

        Each only behind a cached one, which may have been forgotten since.
        """
        num_full = request.num_computed_tokens // self._pool.block_size
        if not request.chain:
            return
        chain, table, size = request.chain, request.block_table, self._pool.block_size
        extend_chain(chain, request.tokens, num_full, size)
        for index in range(request.num_kept_blocks, num_full):
            parent = table[index - 1] if index else None
            if parent is not None and self._pool.cache.digest_of(parent) != chain[index]:
                return
            table[index] = self._pool.keep(table[index], chain[index + 1], parent)
            request.num_kept_blocks = index + 1

    def _preempt_youngest(self) -> Request:
        if len(self._running) == 1 and not self._pool.can_grow:
            raise RuntimeError("The oldest request does not fit the pool; it should not be here.")
        _, request = self._running.popitem()
        slots = self._find_slots(request)
        num_computed = request.num_computed_tokens if slots else 0
        for slot, block_id in zip(slots, request.block_table, strict=False):
            self._moves.append(Move(MoveKind.SWAP_OUT, block_id, slot))
        self._release(request)
        request.swap_slots, request.num_computed_tokens = slots, num_computed
        self._num_swaps += bool(slots)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)
        return request

    def _find_slots(self, request: Request) -> list[int]:
        """Swap slots for what ``request`` has computed; none where it is to be computed again."""
        num_tokens = request.num_computed_tokens
        num_blocks = self._pool.blocks_for(num_tokens)
        return (
            self.swap.allocate(num_blocks) if self.costs.prefer_swap(num_tokens, num_blocks) else []
        )

    def _swap_in(self, request: Request, num_reused: int) -> None:
        """Bring back what ``request`` had computed, but for the blocks that it found in use."""
        slots = request.swap_slots
        for slot, block_id in list(zip(slots, request.block_table, strict=False))[num_reused:]:
            self._moves.append(Move(MoveKind.SWAP_IN, slot, block_id))
        self.swap.release(slots)
        request.swap_slots = []

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
        self.swap.release(request.swap_slots)
        request.block_table, request.swap_slots = [], []
        request.num_computed_tokens = request.num_kept_blocks = 0
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
