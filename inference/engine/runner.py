"""One forward pass over a step plan: its rows become flat tensors, and those that sample get logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from inference.engine.kv_cache import KVCache
from inference.engine.scheduler import PlannedRow, StepPlan
from inference.models.attention import AttentionBatch, Span
from inference.models.decoder import Decoder
from inference.models.layers import MIN_ROWS


class Runner:
    """Runs plans of one model on one cache.

    ``num_token_ids`` is how many ids the tokenizer knows; a model whose vocabulary is padded beyond it never gets to
    choose the rest.
    """

    def __init__(self, model: Decoder, kv_cache: KVCache, *, num_token_ids: int) -> None:
        self._model = model
        self._cache = kv_cache
        self._num_token_ids = num_token_ids

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
        device = self._model.device
        spans = [Span(row.start, row.num_tokens, row.request.block_table) for row in plan.rows]
        batch = AttentionBatch.from_spans(self._cache.shape, spans, device)
        self._cache.clear(batch.first_blocks)
        logit_rows = _logit_rows(plan.rows)
        logits = self._model.forward(
            _padded([_token_ids(row) for row in plan.rows], device),
            _padded([range(row.start, row.start + row.num_tokens) for row in plan.rows], device),
            _padded([logit_rows], device),
            batch,
            self._cache.tensor,
        )[: len(logit_rows)]
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


def _padded(parts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The parts one after another, with zeros up to ``MIN_ROWS``; nothing stays nothing."""
    values = torch.tensor([value for part in parts for value in part], dtype=torch.int64)
    missing = max(MIN_ROWS - values.shape[0], 0) if values.shape[0] else 0
    return functional.pad(values, (0, missing)).to(device)
