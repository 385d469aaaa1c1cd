"""Static against continuous batching: how many slot-steps are held, and how many of them give a token.

A static batch is held until its longest answer ends; iteration-level scheduling lets every answer leave, and the next
one join, at any step. Source: Yu et al. (2022), "Orca: A Distributed Serving System for Transformer-Based Generative
Models", OSDI '22, sections 2 and 3.1.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference.planner.shape import InvalidPlan

MAX_LENGTH = 10**9
MAX_LENGTHS = 10**5
_NEGLIGIBLE = 1e-9
_FINE = 1000  # of a mean above it, no single tokens are told apart


@dataclass(frozen=True, slots=True)
class SlotSteps:
    """Steps of one slot: those that were held, those that gave a token, and how long the whole took."""

    held: int
    used: int
    num_steps: int

    @property
    def wasted(self) -> int:
        """Held for nothing."""
        return self.held - self.used

    @property
    def waste(self) -> float:
        """Their share."""
        return self.wasted / self.held


def batch_statically(lengths: Sequence[int], batch: int) -> SlotSteps:
    """Answers of these lengths in batches of ``batch``, in order; each batch lasts as long as its longest answer."""
    _check(lengths, batch)
    batches = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    return SlotSteps(
        held=sum(len(each) * max(each) for each in batches),
        used=sum(lengths),
        num_steps=sum(max(each) for each in batches),
    )


def batch_continuously(lengths: Sequence[int], batch: int) -> SlotSteps:
    """The same answers in ``batch`` slots: whoever is next takes the slot that comes free first."""
    _check(lengths, batch)
    free_at = [0] * min(batch, len(lengths))
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return SlotSteps(held=sum(lengths), used=sum(lengths), num_steps=max(free_at))


def expected_waste(distribution: Mapping[int, float], batch: int) -> float:
    """Share of slot-steps that static batches of ``batch`` answers waste, lengths drawn from ``distribution``.

    1 - E[length] / E[longest of the batch], and the longest is above t with probability 1 - P(length <= t) ** batch.
    """
    _check(list(distribution), batch)
    total = sum(distribution.values())
    mean = sum(length * weight for length, weight in distribution.items()) / total
    longest, below, reached = 0.0, 0.0, 0
    for length in sorted(distribution):
        longest += (length - reached) * (1 - below**batch)
        below, reached = min(below + distribution[length] / total, 1.0), length
    return 1 - mean / longest


def geometric(mean: float) -> dict[int, float]:
    """Lengths of answers that end at every token with the same probability, as far as they matter.

    Long ones are put together, ``stride`` neighbours at the one in their middle, so that there are never many.

    Raises:
        InvalidPlan: the mean is below one token.
    """
    if mean < 1:
        raise InvalidPlan("output_tokens", f"output_tokens={mean:g} must be at least 1.")
    stride = 1 + int(mean) // _FINE
    going_on = (1 - 1 / mean) ** stride
    length, left, lengths = (1 + stride) // 2, 1.0, {}
    while left >= _NEGLIGIBLE:
        lengths[length] = left * (1 - going_on)
        left *= going_on
        length += stride
    return lengths


def _check(lengths: Sequence[int], batch: int) -> None:
    if not 1 <= len(lengths) <= MAX_LENGTHS:
        raise InvalidPlan(
            "lengths", f"lengths has {len(lengths)} entries; it must have 1 to {MAX_LENGTHS}."
        )
    for bad in (length for length in lengths if not 1 <= length <= MAX_LENGTH):
        raise InvalidPlan("lengths", f"lengths has {bad}; each must be from 1 to {MAX_LENGTH}.")
    if batch < 1:
        raise InvalidPlan("batch", f"batch={batch} must be at least 1.")
