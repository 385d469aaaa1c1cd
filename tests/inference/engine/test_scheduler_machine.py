"""No order of arrivals, steps, aborts and failures breaks a promise of the scheduler, and every broken one is seen."""

from __future__ import annotations

import sys

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

from inference.engine.scheduler import SchedulerLimits
from inference.protocol import SamplingParams
from tests.inference.engine.checked_scheduler import Case, CheckedScheduler
from tests.inference.engine.echo_kv import VOCAB_SIZE
from tests.inference.engine.scheduler_mutants import MUTANTS, Mutant

EOS_TOKEN_IDS = frozenset(range(VOCAB_SIZE // 20))


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
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_budget: int,
        long_prefill_tokens: int,
        max_model_len: int,
    ) -> None:
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            long_prefill_tokens=long_prefill_tokens,
            max_model_len=max_model_len,
            eos_token_ids=EOS_TOKEN_IDS,
        )
        self.checked = CheckedScheduler(limits, num_blocks=num_blocks, block_size=block_size)

    @rule(
        # Short prompts with long answers outgrow the pool only after they were let in.
        prompt_lengths=st.lists(st.integers(1, 4) | st.integers(1, 14), min_size=1, max_size=4),
        max_tokens=st.none() | st.integers(1, 24),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt_lengths: list[int], max_tokens: int | None, ignore_eos: bool) -> None:
        for length in prompt_lengths:
            self._add_one(str(len(self.checked.cases)), length, max_tokens, ignore_eos)

    @precondition(lambda self: any(case.request.is_finished for case in self.checked.cases))
    @rule(prompt_length=st.integers(1, 14))
    def reuse_the_id_of_the_last_that_ended(self, prompt_length: int) -> None:
        ended = [case.request.id for case in self.checked.cases if case.request.is_finished]
        if ended[-1] not in self.checked.scheduler:
            self._add_one(ended[-1], prompt_length, None, True)

    @precondition(lambda self: self.checked.step is None)
    @rule(count=st.integers(1, 16))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
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
    @rule(index=st.integers(0, 99), by_stop_string=st.booleans())
    def end_one(self, index: int, by_stop_string: bool) -> None:
        self._end(self.checked.cases[-1 - index % len(self.checked.cases)], by_stop_string)

    @precondition(lambda self: self.checked.step is None and self.checked.unfinished)
    @rule(index=st.integers(0, 9), by_stop_string=st.booleans())
    def end_one_between_plan_and_commit(self, index: int, by_stop_string: bool) -> None:
        self.checked.plan()
        # The oldest ones first: they have a row in the plan.
        self._end(self.checked.unfinished[index % len(self.checked.unfinished)], by_stop_string)
        self.checked.commit()

    def teardown(self) -> None:
        # After a failure, Hypothesis still comes here; a second failure would hide the first.
        if hasattr(self, "checked") and sys.exc_info()[0] is None:
            self.checked.drain()

    def _end(self, case: Case, by_stop_string: bool) -> None:
        if by_stop_string and not case.request.is_finished:
            self.checked.stop(case)
        elif case.request.id not in self.checked.scheduler or not case.request.is_finished:
            self.checked.abort(case)

    def _add_one(
        self, request_id: str, prompt_length: int, max_tokens: int | None, ignore_eos: bool
    ) -> None:
        seed = len(self.checked.cases)
        prompt = [(seed * 31 + position) % VOCAB_SIZE for position in range(prompt_length)]
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
        self.checked.add(request_id, prompt, sampling)


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
