"""One forward pass over a step plan: its rows become a flat step, and those that sample get logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.engine.kv_cache import KVCache
from inference.engine.scheduler import PlannedRow, StepPlan
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

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Compute the tokens of ``plan`` and leave their keys and values in the cache.

        Running the same plan again gives the same, as long as nothing was committed in between.

        Returns:
            Float32 logits ``[num_sampling_rows, vocab_size]`` in the order of the plan.
        """
        step = Step(
            token_ids=[token_id for row in plan.rows for token_id in _token_ids(row)],
            spans=[Span(row.start, row.num_tokens, row.request.block_table) for row in plan.rows],
            logit_rows=_logit_rows(plan.rows),
        )
        logits = self._model.compute(step, self._cache.tensor)
        logits[:, self._num_token_ids :] = -torch.inf
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
