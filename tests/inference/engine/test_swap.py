"""Swap slots are handed out once; a copy is chosen where moving bytes is cheaper than computing tokens."""

from __future__ import annotations

import pytest

from inference.engine.plan import PlannedRow, StepPlan
from inference.engine.request import Request
from inference.engine.swap import PreemptionCosts, SwapSpace
from inference.protocol import SamplingParams

MIB = 2**20


def _plan(*lengths: int) -> StepPlan:
    request = Request.from_prompt("a", [1], SamplingParams())
    return StepPlan(tuple(PlannedRow(request, 0, length, samples=False) for length in lengths))


def test_slots_are_handed_out_once_and_all_or_none() -> None:
    swap = SwapSpace(5)
    first, second = swap.allocate(3), swap.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (swap.num_held, swap.num_free, swap.allocate(1)) == (5, 0, [])
    swap.release(first)
    assert swap.allocate(4) == []
    assert swap.num_free == 3
    swap.check_integrity([second])


def test_a_space_is_resized_only_while_nobody_has_a_slot() -> None:
    swap = SwapSpace()
    assert swap.allocate(1) == []
    assert swap.resize(2)
    slots = swap.allocate(2)
    assert not swap.resize(0)
    swap.release(slots)
    assert swap.resize(0)
    assert swap.num_slots == 0


@pytest.mark.parametrize("holders", [[[0]], [[0, 1], [1]], [[0, 1, 2]]])
def test_integrity_finds_a_slot_that_is_lost_or_has_two_holders(holders: list[list[int]]) -> None:
    swap = SwapSpace(3)
    swap.allocate(2)
    with pytest.raises(RuntimeError, match="Of 3 swap slots"):
        swap.check_integrity(holders)


@pytest.mark.parametrize(
    ("copy_bytes_per_s", "prefill_tokens_per_s", "is_cheaper"),
    # 160 tokens in 10 blocks of 2 MiB: 40 MiB both ways. 131,072 bytes a token, as Llama 3 8B in bf16 has.
    [
        (25e9, 25_000.0, True),  # 1.7 ms against 6.4 ms
        (5e9, 25_000.0, False),  # 8.4 ms against 6.4 ms
        (5e9, 300.0, True),  # a CPU
    ],
)
def test_a_copy_is_chosen_where_it_is_cheaper(
    copy_bytes_per_s: float, prefill_tokens_per_s: float, is_cheaper: bool
) -> None:
    costs = PreemptionCosts(2 * MIB, copy_bytes_per_s, prefill_tokens_per_s)
    assert costs.prefer_swap(num_tokens=160, num_blocks=10) == is_cheaper


def test_nothing_is_copied_before_a_prefill_was_measured_or_when_nothing_was_computed() -> None:
    costs = PreemptionCosts(MIB)
    assert not costs.prefer_swap(100, 7)
    costs.observe_step(_plan(16), 1.0)
    assert costs.prefer_swap(100, 7)
    assert not costs.prefer_swap(0, 0)


def test_rates_are_measured_and_newer_measurements_weigh_more() -> None:
    costs = PreemptionCosts(MIB)
    costs.observe_step(_plan(100), 1.0)
    costs.observe_step(_plan(200), 1.0)
    assert costs.prefill_tokens_per_s == pytest.approx((0.8 * 100 + 200) / 1.8)
    costs.observe_step(_plan(1, 1, 1, 1, 1, 1, 4), 1.0)  # decodes: another rate
    assert costs.prefill_tokens_per_s == pytest.approx((0.8 * 100 + 200) / 1.8)
    costs.observe_moves(4, 0.5)
    assert costs.copy_bytes_per_s == pytest.approx(8 * MIB)
    costs.observe_moves(0, 0.0)
    assert costs.copy_bytes_per_s == pytest.approx(8 * MIB)
