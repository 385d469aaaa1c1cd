"""How a step lies in memory: buckets of decode batches, rows that fill them up, slots, and lists of pages.

Numbers only, on the host. A decode step is one array ``[num_rows, FIXED_COLUMNS + num_columns]``, so that one copy
brings all of it into the buffer that a captured graph reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inference.models.attention import Span
from inference.models.step import Step

FIXED_COLUMNS = 3
"""Token id, position, slot; then the block table, as wide as the attention needs it."""

PADDING = -1
"""The position of a row that stands for no token. Its slot is the first of block 0, which stays zero."""

_SMALL_BUCKETS = (1, 2, 4)
_BUCKET_STEP = 8

Indices = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pages:
    """Ragged lists: the queries of sequence ``i`` are ``query_ends[i]:query_ends[i + 1]``, its pages likewise.

    ``last_lengths`` is how many tokens lie in the last page of each.
    """

    query_ends: Int32s
    page_ends: Int32s
    pages: Int32s
    last_lengths: Int32s

    @classmethod
    def of(cls, spans: Sequence[Span], block_size: int, *, num_rows: int = 0) -> Pages:
        """The pages of ``spans``; up to ``num_rows`` sequences more of one token in block 0."""
        num_missing = max(num_rows - len(spans), 0)
        tables = [span.block_table[: -(-span.end // block_size)] for span in spans]
        tables += [[0]] * num_missing
        lengths = [(span.end - 1) % block_size + 1 for span in spans] + [1] * num_missing
        counts = [span.num_tokens for span in spans] + [1] * num_missing
        return cls(
            query_ends=_ends(counts),
            page_ends=_ends([len(table) for table in tables]),
            pages=np.array([page for table in tables for page in table], dtype=np.int32),
            last_lengths=np.array(lengths, dtype=np.int32),
        )


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that decode steps are filled up to: 1, 2, 4, then every eighth, the last ``max_num_seqs``."""
    sizes = [*_SMALL_BUCKETS, *range(_BUCKET_STEP, max_num_seqs, _BUCKET_STEP)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def bucket_of(num_rows: int, sizes: Sequence[int]) -> int:
    """The smallest of ascending ``sizes`` that holds ``num_rows``; 0 where none does."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else 0


def power_of_two_from(number: int, least: int) -> int:
    """The smallest ``least * 2**n`` that is not below ``number``."""
    size = least
    while size < number:
        size *= 2
    return size


def is_decode(step: Step) -> bool:
    """Whether each sequence has one new token."""
    return all(span.num_tokens == 1 for span in step.spans)


def slots_of(span: Span, block_size: int) -> Indices:
    """Where the new tokens of ``span`` write: block times ``block_size`` plus the place in the block."""
    positions = np.arange(span.start, span.end)
    table = np.asarray(span.block_table, dtype=np.int64)
    slots: Indices = table[positions // block_size] * block_size + positions % block_size
    return slots


def first_blocks(slots: Indices, block_size: int) -> Indices:
    """Blocks whose first slot is among ``slots``: their owner is new."""
    blocks: Indices = slots[slots % block_size == 0] // block_size
    return blocks


def pack_decode(step: Step, block_size: int, *, num_rows: int, num_columns: int) -> Indices:
    """A decode step of up to ``num_rows`` sequences as a graph reads it, the rest of the rows padding.

    Of a block table no more than ``num_columns`` are kept, which must hold all that the sequence has written; block 0
    fills shorter ones up.
    """
    packed = np.zeros((num_rows, FIXED_COLUMNS + num_columns), dtype=np.int64)
    packed[:, 1] = PADDING
    rows = zip(packed, step.token_ids, step.spans, strict=False)
    for row, token_id, span in rows:
        row[0], row[1] = token_id, span.start
        [row[2]] = slots_of(span, block_size)
        num_used = min(-(-span.end // block_size), num_columns)
        row[FIXED_COLUMNS : FIXED_COLUMNS + num_used] = span.block_table[:num_used]
    return packed


def _ends(counts: Sequence[int]) -> Int32s:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
