"""Slots that idle: a batch that waits for its longest request, against one that every request joins and leaves alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from inference.engine.scheduler import Scheduler
from tests.inference.engine.small_scheduler import LIMITS, add, make_scheduler, step

LENGTHS = (4, 10, 14, 16)  # in tokens; the published example of a static batch of four
NUM_SLOTS = LIMITS.max_num_seqs
NAMES = (f"{number}" for number in count())


def count_idle(scheduler: Scheduler) -> int:
    """Slots without a row in the next step, which is made."""
    return NUM_SLOTS - len(step(scheduler))


def idle_until_empty(scheduler: Scheduler) -> list[int]:
    """For each step until nothing is unfinished."""
    idle = []
    while scheduler.num_unfinished:
        idle.append(count_idle(scheduler))
    return idle


def send(scheduler: Scheduler, lengths: Sequence[int]) -> None:
    for length in lengths:
        add(scheduler, next(NAMES), max_tokens=length)


def run_static(waves: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Idle slots of each wave, which is sent when the one before has ended."""
    scheduler, _ = make_scheduler()
    for wave in waves:
        send(scheduler, wave)
        yield idle_until_empty(scheduler)


def test_a_static_batch_leaves_31_per_cent_of_its_slot_steps_idle() -> None:
    for idle in run_static([LENGTHS, LENGTHS[::-1]]):
        assert len(idle) == 16
        assert sum(idle) == 20
        assert sum(idle) / (len(idle) * NUM_SLOTS) == 0.3125


def test_with_followers_no_slot_step_is_idle() -> None:
    scheduler, _ = make_scheduler()
    send(scheduler, LENGTHS * 4)

    idle = []
    while scheduler.num_waiting:
        idle.append(count_idle(scheduler))

    assert len(idle) >= 16  # as long as the static batch, and longer
    assert sum(idle) == 0


def test_the_same_requests_end_sooner_than_in_waves() -> None:
    scheduler, _ = make_scheduler()
    send(scheduler, LENGTHS * 4)

    num_steps = len(idle_until_empty(scheduler))

    assert sum(map(len, run_static([LENGTHS] * 4))) == 64
    assert num_steps <= 52  # 176 tokens in four slots are 44 steps at best
