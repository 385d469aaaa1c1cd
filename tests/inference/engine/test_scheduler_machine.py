"""No order of arrivals, steps, aborts and failures breaks a promise of the scheduler, and every broken one is seen."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inference.engine.limits import SchedulerLimits
from inference.protocol import SamplingParams
from tests.inference.engine.checked_scheduler import Case, CheckedScheduler, Memory
from tests.inference.engine.echo_kv import VOCAB_SIZE
from tests.inference.engine.mutant import Mutant
from tests.inference.engine.scheduler_mutants import MUTANTS

EOS_TOKEN_IDS = frozenset(range(VOCAB_SIZE // 20))
HOW_TO_END = ("aborted", "stopped", "broken")


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt of ``length`` tokens; all of one ``origin`` begin alike."""

    length: int
    max_tokens: int | None = None
    ignore_eos: bool = True
    origin: int = 0
    n: int = 1


class SchedulerMachine(RuleBasedStateMachine):
    """Pools too small for the load, so that preemption is the rule; each call goes through all checks."""

    checked: CheckedScheduler

    @initialize(
        num_blocks=st.integers(4, 20),
        block_size=st.integers(1, 3),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 8),
        long_prefill_tokens=st.integers(1, 8),
        max_model_len=st.integers(12, 40),
        worth_waiting_tokens=st.integers(1, 8),
        memory=st.builds(
            Memory,
            is_cached=st.sampled_from([True, True, True, False]),
            num_swap_slots=st.sampled_from([0, 3, 30]),
            copies_per_token=st.sampled_from([0.01, 3.0, 100.0]),
        ),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_budget: int,
        long_prefill_tokens: int,
        max_model_len: int,
        worth_waiting_tokens: int,
        memory: Memory,
    ) -> None:
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            long_prefill_tokens=long_prefill_tokens,
            max_model_len=max_model_len,
            eos_token_ids=EOS_TOKEN_IDS,
            worth_waiting_tokens=worth_waiting_tokens,
        )
        self.checked = CheckedScheduler(
            limits, num_blocks=num_blocks, block_size=block_size, memory=memory
        )

    @rule(
        # Short prompts with long answers outgrow the pool only after they were let in.
        prompt_lengths=st.lists(st.integers(1, 4) | st.integers(1, 14), min_size=1, max_size=4),
        max_tokens=st.none() | st.integers(1, 24),
        ignore_eos=st.booleans(),
        origin=st.integers(0, 1),
        n=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def add(
        self,
        prompt_lengths: list[int],
        max_tokens: int | None,
        ignore_eos: bool,
        origin: int,
        n: int,
    ) -> None:
        for length in prompt_lengths:
            self._add_one(Ask(length, max_tokens, ignore_eos, origin, n))

    @precondition(lambda self: self.checked.cases)
    @rule(
        index=st.integers(0, 99),
        num_tokens=st.integers(1, 30),
        max_tokens=st.none() | st.integers(1, 24),
    )
    def go_on_with_an_answer(self, index: int, num_tokens: int, max_tokens: int | None) -> None:
        case = self.checked.cases[-1 - index % len(self.checked.cases)]
        prompt, sampling = case.request.tokens[:num_tokens], case.request.sampling
        self.checked.add(
            str(len(self.checked.cases)),
            prompt,
            replace(sampling, max_tokens=max_tokens),
            salt=case.request.cache_salt,
        )

    @precondition(lambda self: any(case.request.is_finished for case in self.checked.cases))
    @rule(prompt_length=st.integers(1, 14))
    def reuse_the_id_of_the_last_that_ended(self, prompt_length: int) -> None:
        ended = [case.request.id for case in self.checked.cases if case.request.is_finished]
        if ended[-1] not in self.checked.scheduler:
            self._add_one(Ask(prompt_length), ended[-1])

    @precondition(lambda self: self.checked.step is None)
    @rule(count=st.integers(1, 16), is_tried_before=st.booleans())
    def run_steps(self, count: int, is_tried_before: bool) -> None:
        for _ in range(count):
            if is_tried_before:
                self.checked.plan_in_vain()
            self.checked.plan()
            self.checked.commit()

    @precondition(lambda self: self.checked.step is None)
    @rule()
    def plan(self) -> None:
        self.checked.plan()

    @precondition(lambda self: self.checked.step is not None)
    @rule()
    def commit(self) -> None:
        self.checked.commit()

    @precondition(lambda self: self.checked.step is not None)
    @rule()
    def lose_the_step(self) -> None:
        self.checked.drop_step()

    @precondition(lambda self: self.checked.cases)
    @rule(index=st.integers(0, 99), how=st.sampled_from(HOW_TO_END))
    def end_one(self, index: int, how: str) -> None:
        cases = self.checked.unfinished if index % 4 else self.checked.cases
        if cases:
            self._end(cases[-1 - index % len(cases)], how)

    @precondition(lambda self: self.checked.preempted)
    @rule(how=st.sampled_from(HOW_TO_END))
    def end_one_that_gave_way(self, how: str) -> None:
        self._end(self.checked.preempted[0], how)

    @precondition(lambda self: self.checked.step is None and self.checked.unfinished)
    @rule(index=st.integers(0, 9), how=st.sampled_from(HOW_TO_END))
    def end_one_between_plan_and_commit(self, index: int, how: str) -> None:
        self.checked.plan()
        # The oldest ones first: they have a row in the plan.
        self._end(self.checked.unfinished[index % len(self.checked.unfinished)], how)
        self.checked.commit()

    def teardown(self) -> None:
        # After a failure, Hypothesis still comes here; a second failure would hide the first.
        if hasattr(self, "checked") and sys.exc_info()[0] is None:
            self.checked.drain()

    def _end(self, case: Case, how: str) -> None:
        if how == "stopped" and not case.request.is_finished:
            self.checked.stop(case)
        elif case.request.id not in self.checked.scheduler or not case.request.is_finished:
            self.checked.abort(case, is_broken=how == "broken")

    def _add_one(self, ask: Ask, request_id: str = "") -> None:
        seed = len(self.checked.cases)
        prompt = [(ask.origin * 31 + position) % VOCAB_SIZE for position in range(ask.length)]
        sampling = SamplingParams(max_tokens=ask.max_tokens, seed=seed, ignore_eos=ask.ignore_eos)
        salt = "other" if seed % 4 == 3 else ""
        self.checked.add(request_id or str(seed), prompt, sampling, n=ask.n, salt=salt)


@pytest.mark.slow
def test_no_schedule_breaks_a_promise() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=120, stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_scheduler_with_one_thing_wrong_is_seen(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(mutant.target, mutant.attribute)
    monkeypatch.setattr(mutant.target, mutant.attribute, mutant.mutate(original))
    search = settings(
        max_examples=1000,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )

    with pytest.raises(AssertionError, match=f"^({mutant.promise})"):
        run_state_machine_as_test(SchedulerMachine, settings=search)
