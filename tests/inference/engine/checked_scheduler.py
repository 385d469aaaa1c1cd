"""A scheduler with an echo runner behind it, whose every move is checked against what must always hold.

- B1: a block is free, idle, or held by exactly the tables that name it.
- B2: a cached block holds what its digest says, behind a cached one; a request finds only what it may know; and what
  it has computed is there.
- B3: a row writes only to blocks that its request alone holds and nobody can find (checked by the runner).
- B4: swap slots are held by preempted requests alone, each by one.
- S1: a step keeps its limits, every decoding request has a row, and prefills use the rest.
- S2: an accepted request reaches exactly one terminal status, and then holds nothing.
- S3: nobody is served before an older request.
- S4: the oldest request is never preempted and advances in every step.
- S5: tokens do not depend on the schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from inference.engine.block_pool import NULL_BLOCK, BlockPool
from inference.engine.choices import make_choices
from inference.engine.limits import SchedulerLimits
from inference.engine.plan import StepPlan
from inference.engine.prefix_cache import Chain, extend_chain, start_chain
from inference.engine.request import Request, RequestRefused, Status
from inference.engine.scheduler import Scheduler
from inference.engine.swap import PreemptionCosts
from inference.protocol import FinishReason, SamplingParams
from tests.inference.engine.echo_kv import EchoKV, dense_answer

VERSION = "version"


@dataclass(slots=True, eq=False)
class Case:
    """An accepted request, the answer it must give, and what it was when it ended."""

    request: Request
    answer: list[int]
    chain: Chain
    is_cut_short: bool = False
    end: tuple[Status, FinishReason | None, list[int]] | None = None


@dataclass(slots=True)
class Step:
    """A plan that was run and waits for its commit."""

    plan: StepPlan
    token_ids: dict[str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a scheduler may keep: cached prompts, and in swap space what ``copies_per_token`` make worth it."""

    is_cached: bool = True
    num_swap_slots: int = 0
    copies_per_token: float = 1.0


@dataclass(frozen=True, slots=True)
class Content:
    """What a digest names: the tokens of entry ``index`` of a table, behind the block that ``parent`` names."""

    index: int
    tokens: Sequence[int]
    parent: bytes


@dataclass(slots=True)
class Before:
    """What was true when a plan was asked for."""

    unfinished: list[Case]
    num_preemptions: dict[Case, int] = field(default_factory=dict)


class CheckedScheduler:
    """The calls an engine makes, each followed by all checks; a broken promise is an ``AssertionError``."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        num_blocks: int,
        block_size: int,
        memory: Memory | None = None,
    ) -> None:
        memory = memory or Memory()
        self.limits = limits
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            limits,
            self.pool,
            version=VERSION if memory.is_cached else None,
            costs=PreemptionCosts(1, memory.copies_per_token, prefill_tokens_per_s=1.0),
        )
        assert self.scheduler.swap.resize(memory.num_swap_slots)
        self.kv = EchoKV(self.pool, memory.num_swap_slots)
        self.contents: dict[bytes, Content] = {}
        self.cases: list[Case] = []
        self.step: Step | None = None

    @property
    def unfinished(self) -> list[Case]:
        """Accepted requests that have not ended, in arrival order."""
        return [case for case in self.cases if not case.request.is_finished]

    @property
    def preempted(self) -> list[Case]:
        """Those of them that gave way and wait."""
        return [case for case in self.unfinished if case.request.status is Status.PREEMPTED]

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        n: int = 1,
        salt: str = "",
    ) -> None:
        """Offer a request for ``n`` answers; each must be accepted exactly if its numbers fit."""
        for request in make_choices(request_id, prompt, sampling, n=n, cache_salt=salt):
            self._add_one(request, prompt)
        self.check()

    def _add_one(self, request: Request, prompt: Sequence[int]) -> None:
        sampling = request.sampling
        room = min(self.limits.max_model_len, self.pool.num_slots) - len(prompt)
        max_tokens = sampling.max_tokens or max(room, 1)
        try:
            with _own_defences():
                self.scheduler.add(request)
        except RequestRefused:
            assert max_tokens > room, "S2: a request that fits was refused"
        else:
            assert max_tokens <= room, "S2: a request that can never fit was accepted"
            stops_at = frozenset[int]() if sampling.ignore_eos else self.limits.eos_token_ids
            assert sampling.seed is not None
            answer = dense_answer(
                prompt, seed=sampling.seed, max_tokens=max_tokens, stops_at=stops_at
            )
            self.cases.append(Case(request, answer, self._name_blocks(answer, request.cache_salt)))

    def _name_blocks(self, answer: Sequence[int], salt: str) -> Chain:
        chain, size = start_chain(VERSION, salt), self.pool.block_size
        extend_chain(chain, answer, len(answer) // size, size)
        for index, digest in enumerate(chain[1:]):
            tokens = answer[index * size : (index + 1) * size]
            self.contents[digest] = Content(index, tokens, chain[index])
        return chain

    def plan_in_vain(self) -> None:
        """Plan a step that never runs: what it was to move comes with the next one."""
        with _own_defences():
            self.scheduler.plan()

    def plan(self) -> None:
        """Plan a step and run it; what it computed waits for the commit."""
        before = Before(self.unfinished)
        before.num_preemptions = {case: case.request.num_preemptions for case in before.unfinished}
        with _own_defences():
            plan = self.scheduler.plan()
        self._check_preemptions(plan, before)
        self._check_limits(plan)
        self._check_shares(plan)
        self.step = Step(plan, self.kv.run(plan))
        self._check_token_ids(self.step)
        for case in self.unfinished:
            assert self.kv.holds(case.request), "B2: what was computed is lost"
        self.check()

    def commit(self) -> None:
        """Commit the step that waits."""
        assert self.step is not None
        step, self.step = self.step, None
        live = [row for row in step.plan.rows if not row.request.is_finished]
        with _own_defences():
            sampled = self.scheduler.commit(step.plan, step.token_ids)
        assert sampled == [row.request for row in live if row.samples], "S2: stale results count"
        self.check()

    def drop_step(self) -> None:
        """Lose the results of the step, as when the runner fails."""
        self.step = None

    def abort(self, case: Case, *, is_broken: bool = False) -> None:
        """Abort a request in whatever state it is."""
        was_here = not case.request.is_finished
        case.is_cut_short |= was_here
        table = list(case.request.block_table)
        with _own_defences():
            found = self.scheduler.abort(case.request.id, is_broken=is_broken)
        if is_broken:
            known = [block_id for block_id in table if block_id in self.pool.cache]
            assert not known, "B2: what a broken request computed can be found"
        assert found == was_here, "S2: abort does not say whether the request was here"
        assert case.request.is_finished, "S2: an aborted request goes on"
        self.check()

    def stop(self, case: Case) -> None:
        """End an unfinished request as a stop string does."""
        case.is_cut_short = True
        with _own_defences():
            self.scheduler.finish(case.request.id, FinishReason.STOP)
        assert case.request.finish_reason is FinishReason.STOP, "S2: a stopped request goes on"
        self.check()

    def drain(self) -> None:
        """Run until nothing is left, in at most as many steps as there are tokens."""
        if self.step is not None:
            self.commit()
        most = sum(len(case.answer) for case in self.unfinished)
        for _ in range(most):
            if self.unfinished:
                self.plan()
                self.commit()
        assert not self.unfinished, "S3: the work does not end"
        assert self.scheduler.num_unfinished == 0, "S2: somebody is left"
        assert self.pool.num_held == 0, "B1: blocks are held for nobody"
        assert self.scheduler.swap.num_held == 0, "B4: swap slots are held for nobody"

    def check(self) -> None:
        """All that holds between any two calls."""
        self._check_blocks()
        self._check_cache()
        self._check_swap()
        self._check_order()
        for case in self.cases:
            self._check_tokens(case)
            self._check_end(case)

    def _check_blocks(self) -> None:
        holders = Counter(block_id for case in self.cases for block_id in case.request.block_table)
        assert NULL_BLOCK not in holders, "B1: the null block is held"
        for block_id in range(1, self.pool.num_blocks):
            assert holders[block_id] == self.pool.ref_count(block_id), "B1: a count is wrong"
        assert len(holders) == self.pool.num_held, "B1: free and held do not sum to all"
        with _own_defences():
            self.scheduler.check_integrity()

    def _check_cache(self) -> None:
        cache = self.pool.cache
        for digest, block_id in cache.blocks.items():
            assert digest in self.contents, "B2: a digest names what nobody has"
            content = self.contents[digest]
            assert self.kv.holds_block(block_id, content.index, content.tokens), (
                "B2: a cached block does not hold what its digest says"
            )
            is_reachable = content.index == 0 or cache.get(content.parent) is not None
            assert is_reachable, "B2: a block was forgotten before the one behind it"
            is_idle = self.pool.ref_count(block_id) == 0
            assert cache.is_idle(block_id) == is_idle, "B1: idle and held are confused"
        for case in self.unfinished:
            for block_id, digest in zip(case.request.block_table, case.chain[1:], strict=False):
                found = cache.digest_of(block_id)
                assert found in (None, digest), "B2: a request holds what it may not know"

    def _check_swap(self) -> None:
        slots = [slot for case in self.cases for slot in case.request.swap_slots]
        num_held = self.scheduler.swap.num_held
        assert len(set(slots)) == len(slots) == num_held, "B4: a slot has no holder, or two"
        swapped = [case.request for case in self.cases if case.request.swap_slots]
        assert {each.status for each in swapped} <= {Status.PREEMPTED}, "B4: who runs has slots"

    def _check_order(self) -> None:
        status = Counter(case.request.status for case in self.cases)
        num_waiting = status[Status.WAITING] + status[Status.PREEMPTED]
        assert self.scheduler.num_running == status[Status.RUNNING], "S2: running is miscounted"
        assert self.scheduler.num_waiting == num_waiting, "S2: waiting is miscounted"
        running = [case.request.status is Status.RUNNING for case in self.unfinished]
        assert running == sorted(running, reverse=True), "S3: a younger request runs first"
        num_preemptions = sum(case.request.num_preemptions for case in self.cases)
        assert self.scheduler.num_preemptions == num_preemptions, "S4: preemptions are miscounted"

    def _check_tokens(self, case: Case) -> None:
        tokens = case.request.tokens
        assert tokens == case.answer[: len(tokens)], "S5: the tokens depend on the schedule"
        is_whole = len(tokens) == len(case.answer)
        if not case.is_cut_short:
            assert case.request.is_finished == is_whole, "S5: the answer ends at the wrong place"

    def _check_end(self, case: Case) -> None:
        request = case.request
        if not request.is_finished:
            assert case.end is None, "S2: an ended request is back"
            return
        now = (request.status, request.finish_reason, list(request.tokens))
        case.end = case.end or now
        assert case.end == now, "S2: an ended request still changes"
        assert not request.block_table, "S2: an ended request holds blocks"
        is_answer = request.status is Status.FINISHED
        assert (request.finish_reason is not None) == is_answer, "S2: the reason is wrong"
        if is_answer and not case.is_cut_short:
            by_eos = request.tokens[-1] in self.limits.eos_token_ids
            expected = (
                FinishReason.STOP
                if by_eos and not request.sampling.ignore_eos
                else FinishReason.LENGTH
            )
            assert request.finish_reason is expected, "S2: the reason is wrong"

    def _check_limits(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert plan.num_tokens <= self.limits.max_num_batched_tokens, "S1: over the token budget"
        assert len(rows) <= self.limits.max_num_seqs, "S1: more rows than sequences"
        assert self.scheduler.num_running <= self.limits.max_num_seqs, "S1: too many run"
        assert len({row.request for row in rows}) == len(rows), "S1: two rows for one request"
        for row in rows:
            is_last = row.num_tokens == row.request.num_uncomputed_tokens
            assert 1 <= row.num_tokens <= self.limits.long_prefill_tokens, "S1: over the cap"
            assert row.request.status is Status.RUNNING, "S1: a row for a request that waits"
            assert row.samples == is_last, "S1: a row samples at the wrong place"

    def _check_shares(self, plan: StepPlan) -> None:
        planned = [row.request for row in plan.rows]
        running = [
            case.request for case in self.unfinished if case.request.status is Status.RUNNING
        ]
        decoding = [each for each in running if each.num_uncomputed_tokens == 1]
        prefilling = [each for each in running if each.num_uncomputed_tokens > 1]
        assert set(decoding) <= set(planned), "S1: a decoding request has no row"
        assert not prefilling or prefilling[0] in planned, "S1: no prefill goes on"
        rows = [row for row in plan.rows if row.request in set(prefilling)]
        assert [row.request for row in rows] == prefilling[: len(rows)], "S3: a prefill overtakes"
        for row in rows[:-1]:
            share = min(row.request.num_uncomputed_tokens, self.limits.long_prefill_tokens)
            assert row.num_tokens == share, "S3: a younger prefill has what an older one wants"

    def _check_preemptions(self, plan: StepPlan, before: Before) -> None:
        if not before.unfinished:
            assert not plan.rows, "S2: a row for nobody"
            return
        oldest, *_ = before.unfinished
        gave_way = [
            case
            for case, count in before.num_preemptions.items()
            if case.request.num_preemptions > count
        ]
        assert oldest not in gave_way, "S4: the oldest was preempted"
        assert any(row.request is oldest.request for row in plan.rows), "S4: the oldest stands"
        for case in gave_way:
            assert case.request.status is Status.PREEMPTED, "S4: preempted and resumed in one step"

    def _check_token_ids(self, step: Step) -> None:
        for case in self.unfinished:
            token_id = step.token_ids.get(case.request.id)
            if token_id is not None:
                index = len(case.request.tokens)
                assert case.answer[index : index + 1] == [token_id], (
                    "S5: the tokens depend on the schedule"
                )


@contextmanager
def _own_defences() -> Iterator[None]:
    """Count it as a find when the code itself notices that it is broken."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise AssertionError(f"defended: {error}") from error
