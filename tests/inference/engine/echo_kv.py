"""A runner without a model: its KV cache keeps token ids, its next token depends on all it reads back.

Any error in positions, block tables, preemption, moves or reuse of blocks changes some token, so "the answer does not
depend on the schedule" becomes one equality with ``dense_answer``, which knows neither blocks nor steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inference.engine.block_pool import NULL_BLOCK, BlockPool
from inference.engine.plan import Move, MoveKind, PlannedRow, StepPlan
from inference.engine.request import Request

VOCAB_SIZE = 997
NEVER_WRITTEN = -1


class EchoKV:
    """The blocks of a pool and its swap space. A cell holds position and token, as a key holds its rotary position."""

    def __init__(self, pool: BlockPool, num_swap_slots: int = 0) -> None:
        self._pool = pool
        self._blocks = [[NEVER_WRITTEN] * pool.block_size for _ in range(pool.num_blocks)]
        self._swapped = [[NEVER_WRITTEN] * pool.block_size for _ in range(num_swap_slots)]

    def run(self, plan: StepPlan) -> dict[str, int]:
        """Make all moves, write all rows, then read: the next token of every sampling row, by request id.

        All writes come first, as in a layer of a real model, so that two rows of one step that share a slot
        are seen.
        """
        while plan.moves:
            self._move(plan.moves.popleft())
        for row in plan.rows:
            self._write(row)
        return {row.request.id: self._next_token(row) for row in plan.rows if row.samples}

    def holds(self, request: Request) -> bool:
        """Whether what ``request`` has computed is where it says, in its blocks or in swap space."""
        places = request.swap_slots or request.block_table
        cells = self._swapped if request.swap_slots else self._blocks
        size = self._pool.block_size
        if len(places) * size < request.num_computed_tokens:
            return False
        found = [
            cells[places[position // size]][position % size]
            for position in range(request.num_computed_tokens)
        ]
        return found == [_cell(*each) for each in enumerate(request.tokens)][: len(found)]

    def holds_block(self, block_id: int, index: int, tokens: Sequence[int]) -> bool:
        """Whether a block holds ``tokens`` as entry ``index`` of a table."""
        first = index * self._pool.block_size
        return self._blocks[block_id] == [_cell(*each) for each in enumerate(tokens, first)]

    def _move(self, move: Move) -> None:
        source = self._swapped if move.kind is MoveKind.SWAP_IN else self._blocks
        target = self._swapped if move.kind is MoveKind.SWAP_OUT else self._blocks
        target[move.target] = list(source[move.source])

    def _write(self, row: PlannedRow) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            block_id, offset = self._place(row.request, position)
            assert block_id != NULL_BLOCK, "B3: a row writes to the null block"
            assert self._pool.ref_count(block_id) == 1, (
                "B3: a row writes to a block it does not own"
            )
            assert block_id not in self._pool.cache, "B3: a row writes to a cached block"
            self._blocks[block_id][offset] = _cell(position, row.request.tokens[position])

    def _next_token(self, row: PlannedRow) -> int:
        end = row.start + row.num_tokens
        places = [self._place(row.request, position) for position in range(end)]
        cells = [self._blocks[block_id][offset] for block_id, offset in places]
        return _hash_to_token(cells, row.request.sampling.seed)

    def _place(self, request: Request, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._pool.block_size)
        assert index < len(request.block_table), "B3: a position lies beyond the block table"
        return request.block_table[index], offset


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
