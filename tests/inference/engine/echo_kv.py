"""A runner without a model: its KV cache keeps token ids, its next token depends on all it reads back.

Any error in positions, block tables, preemption or reuse of blocks changes some token, so "the answer does not
depend on the schedule" becomes one equality with ``dense_answer``, which knows neither blocks nor steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inference.engine.block_pool import NULL_BLOCK, BlockPool
from inference.engine.request import Request
from inference.engine.scheduler import PlannedRow, StepPlan

VOCAB_SIZE = 997
NEVER_WRITTEN = -1


class EchoKV:
    """The KV slots of a pool. A cell holds position and token, as a key holds its rotary position."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._cells = [NEVER_WRITTEN] * (pool.num_blocks * pool.block_size)

    def run(self, plan: StepPlan) -> dict[str, int]:
        """Write all rows, then read: the next token of every sampling row, by request id.

        All writes come first, as in a layer of a real model, so that two rows of one step that share a slot
        are seen.
        """
        for row in plan.rows:
            self._write(row)
        return {row.request.id: self._next_token(row) for row in plan.rows if row.samples}

    def _write(self, row: PlannedRow) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            slot = self._slot(row.request, position)
            block_id = slot // self._pool.block_size
            assert block_id != NULL_BLOCK, "B3: a row writes to the null block"
            assert self._pool.ref_count(block_id) == 1, (
                "B3: a row writes to a block it does not own"
            )
            self._cells[slot] = _cell(position, row.request.tokens[position])

    def _next_token(self, row: PlannedRow) -> int:
        end = row.start + row.num_tokens
        cells = [self._cells[self._slot(row.request, position)] for position in range(end)]
        return _hash_to_token(cells, row.request.sampling.seed)

    def _slot(self, request: Request, position: int) -> int:
        index, offset = divmod(position, self._pool.block_size)
        assert index < len(request.block_table), "B3: a position lies beyond the block table"
        return request.block_table[index] * self._pool.block_size + offset


def dense_answer(
    prompt: Sequence[int], *, seed: int, max_tokens: int, stops_at: Collection[int]
) -> list[int]:
    """Prompt and output of a request that has the machine to itself, without blocks or steps."""
    tokens = list(prompt)
    cells = [_cell(position, token) for position, token in enumerate(tokens)]
    for _ in range(max_tokens):
        token = _hash_to_token(cells, seed)
        cells.append(_cell(len(tokens), token))
        tokens.append(token)
        if token in stops_at:
            break
    return tokens


def _cell(position: int, token: int) -> int:
    return position * VOCAB_SIZE + token


def _hash_to_token(cells: Sequence[int], seed: int | None) -> int:
    # The hash of integers is the same in every process; only that of strings is salted.
    return hash((seed, *cells)) % VOCAB_SIZE
