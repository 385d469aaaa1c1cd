"""One forward pass over a step plan: its rows become a flat step, and those that sample get logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.engine.kv_cache import KVCache
from inference.engine.plan import PlannedRow, StepPlan
from inference.models.attention import Span
from inference.models.step import Step, StepModel


class Runner:
    """Runs plans of one model on one cache.

    ``num_token_ids`` is how many ids the tokenizer knows; a model whose vocabulary is padded beyond it never gets to
    choose the rest.
    """

    def __init__(self, model: StepModel, kv_cache: KVCache, *, num_token_ids: int) -> None:
        self._model = model
        self._cache = kv_cache
        self._num_token_ids = num_token_ids

    def describe_numerics(self) -> dict[str, str]:
        """Facts that decide how a sum is rounded; ``kernel`` is what computes."""
        return self._model.describe_numerics()

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self._cache.tensor.device

    @property
    def num_blocks(self) -> int:
        """KV blocks of the cache, the reserved one included."""
        return self._cache.num_blocks

    @property
    def bytes_per_block(self) -> int:
        """Memory of one KV block over all layers."""
        return self._cache.num_bytes // self._cache.num_blocks

    def resize(self, num_blocks: int, kept: Sequence[int]) -> None:
        """Have ``num_blocks`` KV blocks; those in ``kept`` keep what they hold.

        Raises:
            MemoryError: there is no memory for it, and nothing changed.
        """
        self._cache.resize(num_blocks, kept)

    def resize_swap(self, num_slots: int) -> None:
        """Have ``num_slots`` slots of swap space; what lay there is gone.

        Raises:
            MemoryError: there is no memory for it, and nothing changed.
        """
        self._cache.resize_swap(num_slots)

    def move(self, plan: StepPlan) -> int:
        """Make the moves of ``plan`` that are not made yet, and return how many."""
        return self._cache.move(plan.moves)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Make the moves of ``plan``, compute its tokens, and leave their keys and values in the cache.

        Running the same plan again gives the same, as long as nothing was committed in between.

        Returns:
            Float32 logits ``[num_sampling_rows, vocab_size]`` in the order of the plan.
        """
        self.move(plan)
        return self.compute(plan.rows, _logit_rows(plan.rows))

    @torch.inference_mode()
    def compute(self, rows: Sequence[PlannedRow], logit_rows: Sequence[int]) -> Tensor:
        """Compute ``rows``, leave their keys and values in the cache, and answer some of their tokens.

        ``logit_rows`` are indices into the tokens of all rows, one row after the other, in ascending order.

        Returns:
            Float32 logits ``[num_logit_rows, vocab_size]``.
        """
        if not rows:
            return torch.empty((0, self._num_token_ids))
        step = Step(
            token_ids=[token_id for row in rows for token_id in _token_ids(row)],
            spans=[Span(row.start, row.num_tokens, row.request.block_table) for row in rows],
            logit_rows=logit_rows,
        )
        logits = self._model.compute(step, self._cache.tensor)
        logits[:, self._num_token_ids :] = -torch.inf
        if logits.is_cuda:  # the caller reads them next, and measures what they took
            torch.cuda.current_stream(logits.device).synchronize()
        return logits


def _token_ids(row: PlannedRow) -> list[int]:
    return row.request.tokens[row.start : row.start + row.num_tokens]


def _logit_rows(rows: Sequence[PlannedRow]) -> list[int]:
    """The last token of each row that samples, as a row of the flat batch."""
    result: list[int] = []
    end = 0
    for row in rows:
        end += row.num_tokens
        if row.samples:
            result.append(end - 1)
    return result
