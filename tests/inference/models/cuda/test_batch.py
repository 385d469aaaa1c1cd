"""The layout of a step for a device: buckets, rows that fill them up, slots, pages."""

from __future__ import annotations

import numpy as np
import pytest

from inference.models.attention import Span
from inference.models.cuda.batch import (
    Pages,
    bucket_of,
    bucket_sizes,
    first_blocks,
    is_decode,
    pack_decode,
    power_of_two_from,
    slots_of,
)
from inference.models.step import Step


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_buckets_end_with_all_sequences_that_may_run(
    max_num_seqs: int, sizes: tuple[int, ...]
) -> None:
    assert bucket_sizes(max_num_seqs) == sizes


def test_a_bucket_holds_the_rows_and_none_is_smaller() -> None:
    sizes = bucket_sizes(64)
    for count in range(1, 65):
        size = bucket_of(count, sizes)
        assert size >= count
        assert not any(count <= other < size for other in sizes)
    assert bucket_of(65, sizes) == 0


def test_a_width_is_the_least_that_holds_the_blocks() -> None:
    assert [power_of_two_from(number, 8) for number in (1, 8, 9, 16, 17, 100)] == [
        *(8, 8, 16, 16, 32, 128)
    ]


def test_a_packed_step_has_token_position_slot_and_table_then_padding() -> None:
    spans = [Span(5, 1, [9, 4, 7]), Span(8, 1, [3, 2, 6, 8])]
    packed = pack_decode(Step([70, 80], spans, [0, 1]), 4, num_rows=4, num_columns=4)
    assert packed.tolist() == [
        [70, 5, 4 * 4 + 1, 9, 4, 0, 0],
        [80, 8, 6 * 4 + 0, 3, 2, 6, 0],
        [0, -1, 0, 0, 0, 0, 0],
        [0, -1, 0, 0, 0, 0, 0],
    ]


def test_a_packed_step_needs_no_table_where_the_attention_has_its_own() -> None:
    packed = pack_decode(Step([70], [Span(5, 1, [9, 4])], [0]), 4, num_rows=2, num_columns=0)
    assert packed.tolist() == [[70, 5, 17], [0, -1, 0]]


def test_slots_cross_blocks_and_new_blocks_are_those_written_from_the_start() -> None:
    slots = slots_of(Span(2, 7, [5, 1, 8]), 4)
    assert slots.tolist() == [22, 23, 4, 5, 6, 7, 32]
    assert first_blocks(slots, 4).tolist() == [1, 8]


def test_pages_are_ragged_and_padding_is_one_token_of_block_zero() -> None:
    pages = Pages.of([Span(5, 3, [9, 4, 7]), Span(3, 1, [2, 6])], 4, num_rows=4)
    assert pages.query_ends.tolist() == [0, 3, 4, 5, 6]
    assert pages.page_ends.tolist() == [0, 2, 3, 4, 5]
    assert pages.pages.tolist() == [9, 4, 2, 0, 0]
    assert pages.last_lengths.tolist() == [4, 4, 1, 1]
    assert {numbers.dtype for numbers in (pages.query_ends, pages.page_ends, pages.pages)} == {
        np.dtype(np.int32)
    }


def test_a_step_is_a_decode_if_each_sequence_has_one_token() -> None:
    one, two = Span(3, 1, [1]), Span(3, 2, [1, 2])
    assert is_decode(Step([1, 1], [one, one], [0, 1]))
    assert not is_decode(Step([1, 1, 1], [one, two], [0, 2]))
