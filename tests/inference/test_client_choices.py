"""The gateway's side of several choices: each in order and once, none without an end, whatever is lost on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.client import Stream
from inference.protocol import (
    Failure,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StepFrame,
    TokenRow,
)

REQUEST = GenerateRequest("r1", "chat", SamplingParams(), 30.0, prompt="Hello", n=3)
FINISH = Finished(FinishReason.STOP, 1, 3, 0.0, 0.1, 0.2)
FAILURE = Failure("numerical_error", "The logits are not numbers.", 500)
LENGTHS = (3, 2, 4)

pytestmark = pytest.mark.asyncio


def row(choice: int, seq: int, attempt: int = 1, failure: Failure | None = None) -> TokenRow:
    finish = FINISH if seq == LENGTHS[choice] - 1 and failure is None else None
    return TokenRow("r1", attempt, seq, f"c{choice}t{seq} ", finish, failure, choice)


def answer(attempt: int = 1, order: int = 0) -> list[TokenRow]:
    """All rows, those of each choice in order."""
    draw = random.Random(order)  # noqa: S311
    left = {choice: list(range(length)) for choice, length in enumerate(LENGTHS)}
    rows = []
    while left:
        choice = draw.choice(sorted(left))
        rows.append(row(choice, left[choice].pop(0), attempt))
        if not left[choice]:
            del left[choice]
    return rows


def feed(stream: Stream, *rows: TokenRow, fingerprint: str = "fp") -> None:
    for each in rows:
        stream.take(StepFrame("slot-1", "small/1", fingerprint, rows), each)


async def read(stream: Stream) -> list[TokenRow]:
    return [each async for rows in stream for each in rows]


def texts(rows: list[TokenRow]) -> list[str]:
    return ["".join(each.text for each in rows if each.choice == c) for c in range(len(LENGTHS))]


WHOLE = texts(answer())


async def test_a_stream_ends_with_its_last_choice() -> None:
    stream = Stream(REQUEST)
    rows = answer()
    feed(stream, *rows[:-1])
    assert not stream.is_over_at_slot

    feed(stream, rows[-1])

    assert stream.is_over_at_slot
    received = await read(stream)
    assert received == rows
    assert sum(each.is_last for each in received) == len(LENGTHS)


async def test_the_end_of_one_choice_is_not_the_end_at_the_slot() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(1, 0), row(1, 1))

    assert not stream.is_over_at_slot, "Whoever leaves now would leave the others running."


async def test_repeats_of_one_choice_do_not_hide_rows_of_another() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0, 0), row(0, 0), row(1, 0), row(0, 1), row(1, 0), row(2, 0), row(0, 0))
    feed(stream, row(0, 2), row(1, 1), row(0, 2), row(1, 1))
    feed(stream, *(row(2, seq) for seq in range(4)))

    assert texts(await read(stream)) == WHOLE


@pytest.mark.parametrize("gap", [row(1, 1), row(2, 3), replace(row(0, 0), choice=3)])
async def test_a_gap_in_one_choice_ends_the_whole_answer_visibly(gap: TokenRow) -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0, 0), gap)

    last = (await read(stream))[-1]
    assert last.failure is not None
    assert last.failure.code == "stream_gap"
    assert not stream.is_over_at_slot


async def test_a_failure_ends_all_choices() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0, 0), row(1, 0), row(1, 1), row(0, 1, failure=FAILURE), row(2, 0))

    received = await read(stream)
    assert received[-1].failure == FAILURE
    assert len(received) == 4
    assert stream.is_over_at_slot


async def test_an_answer_without_one_of_its_choices_is_not_whole() -> None:
    stream = Stream(replace(REQUEST, deadline_s=-1.0))
    feed(stream, *(each for each in answer() if each.choice != 2))

    last = (await read(stream))[-1]
    assert last.failure is not None
    assert last.failure.code == "deadline_exceeded"


async def test_a_slot_that_computes_differently_does_not_continue_any_choice() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(1, 0))
    feed(stream, row(0, 0, attempt=2), fingerprint="other")

    last = (await read(stream))[-1]
    assert last.failure is not None
    assert last.failure.code == "slot_lost"


async def test_the_notice_of_a_rescue_ends_a_stream_of_which_only_a_later_choice_began() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(2, 0))
    feed(stream, TokenRow("r1", 2, -1, ""), fingerprint="other")

    last = (await read(stream))[-1]
    assert last.failure is not None
    assert last.failure.code == "slot_lost"


@given(lost=st.lists(st.integers(0, 9), max_size=3), orders=st.lists(st.integers(), min_size=4))
async def test_any_number_of_lost_slots_leaves_each_row_once_and_in_order(
    lost: list[int], orders: list[int]
) -> None:
    """Each attempt but the last dies somewhere, and each interleaves the choices in another way."""
    stream = Stream(REQUEST)
    for attempt, num_rows in enumerate(lost, 1):
        feed(stream, TokenRow("r1", attempt, -1, ""), *answer(attempt, orders[attempt])[:num_rows])
    feed(stream, *answer(len(lost) + 1, orders[0]))

    received = await read(stream)
    assert texts(received) == WHOLE
    assert sum(each.is_last for each in received) == len(LENGTHS)
    for choice, length in enumerate(LENGTHS):
        assert [each.seq for each in received if each.choice == choice] == list(range(length))
