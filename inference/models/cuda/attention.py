"""Attention by block table: what a step asks of it, and the way that needs nothing but torch.

The cache of one layer is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, as ``AttentionShape`` describes it; that is
FlashInfer's paged layout ``HND`` too, so both ways read the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from inference.models.attention import AttentionShape, Span
from inference.models.cuda.batch import power_of_two_from

Attend = Callable[[Tensor, Tensor], Tensor]
"""Layer cache and queries ``[num_rows, num_heads, head_dim]`` to answers ``[num_rows, num_heads * head_dim]``."""


class DecodeAttention(Protocol):
    """How the decode steps of one bucket attend."""

    def plan(self, spans: Sequence[Span], /) -> None:
        """Take a step's spans before it is computed, on the host and outside any graph."""

    def bind(self, positions: Tensor, tables: Tensor, /) -> Attend:
        """The part that a graph may capture; ``positions [num_rows]``, ``tables [num_rows, num_columns]``."""


class Attention(Protocol):
    """A way to attend."""

    @property
    def name(self) -> str:
        """For logs and fingerprints."""

    def plan(self, spans: Sequence[Span]) -> Attend:
        """How the tokens of ``spans`` attend, in this order, once."""

    def count_columns(self, spans: Sequence[Span], /) -> int:
        """How much of each block table a decode step of ``spans`` must bring to the device."""

    def open_decode(self, num_rows: int, /) -> DecodeAttention:
        """How decode steps of ``num_rows`` rows attend, again and again."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Sequences with equally many queries each.

    ``block_rows`` are rows of the cache seen as ``[..., block_size * head_dim]``: keys and then values of every sequence,
    head and block. ``sees`` is ``[num_sequences, 1, num_queries * group, num_keys]``.
    """

    num_sequences: int
    block_rows: Tensor
    sees: Tensor


class GatherAttention:
    """Keys and values are gathered by block table, then torch's scaled dot product attention has them in one piece.

    A decode step reads its keys and values about three times (gather, write, attend), up to a power of two of
    whole splits; FlashInfer reads them once. What a query may not see weighs exactly zero.
    """

    name = "sdpa"

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    def plan(self, spans: Sequence[Span]) -> Attend:
        """As ``Attention.plan``: all that decode in one tile, each piece of a prompt in its own."""
        ends = list(accumulate((span.num_tokens for span in spans), initial=0))
        decoding = [index for index, span in enumerate(spans) if span.num_tokens == 1]
        groups = [decoding] if decoding else []
        groups += [[index] for index, span in enumerate(spans) if span.num_tokens > 1]
        tiles = []
        for members in groups:
            rows = np.concatenate([np.arange(ends[index], ends[index + 1]) for index in members])
            tile = self._tile_of([spans[index] for index in members])
            tiles.append((torch.from_numpy(rows).to(self._device), tile))

        def attend(layer_cache: Tensor, queries: Tensor) -> Tensor:
            result = torch.empty_like(queries).flatten(1)
            for rows, tile in tiles:
                answers = self._attend(tile, layer_cache, queries.index_select(0, rows))
                result.index_copy_(0, rows, answers)
            return result

        return attend

    def count_columns(self, spans: Sequence[Span]) -> int:
        """Blocks of the longest, up to a power of two of splits, so that few widths occur."""
        block_size = self._shape.block_size
        most = max(-(-span.end // block_size) for span in spans)
        return power_of_two_from(most, self._shape.split_keys // block_size)

    def open_decode(self, _num_rows: int, /) -> DecodeAttention:
        """As ``Attention.open_decode``; it keeps nothing between steps."""
        return _GatherDecode(self)

    def bind(self, positions: Tensor, tables: Tensor) -> Attend:
        """Attention of one query at each of ``positions``."""
        tile = self._tile(positions.clamp(min=0)[:, None], tables)
        return lambda layer_cache, queries: self._attend(tile, layer_cache, queries)

    def _tile_of(self, spans: Sequence[Span]) -> _Tile:
        tables = np.zeros((len(spans), self.count_columns(spans)), dtype=np.int64)
        for table, span in zip(tables, spans, strict=True):
            used = -(-span.end // self._shape.block_size)
            table[:used] = span.block_table[:used]
        positions = np.stack([np.arange(span.start, span.end) for span in spans])
        return self._tile(
            torch.from_numpy(positions).to(self._device), torch.from_numpy(tables).to(self._device)
        )

    def _tile(self, positions: Tensor, tables: Tensor) -> _Tile:
        """``positions [num_sequences, num_queries]``, ``tables [num_sequences, num_blocks]``; of device operations only."""
        shape = self._shape
        heads = torch.arange(2 * shape.num_kv_heads, device=tables.device)
        rows = tables[None, :, None, :] * heads.numel() + heads.view(2, 1, -1, 1)
        keys = torch.arange(tables.shape[1] * shape.block_size, device=tables.device)
        sees = keys <= positions.repeat_interleave(shape.group, 1)[..., None]
        return _Tile(positions.shape[0], rows.flatten(), sees[:, None])

    def _attend(self, tile: _Tile, layer_cache: Tensor, queries: Tensor) -> Tensor:
        """Answers ``[num_sequences * num_queries, num_heads * head_dim]``; query heads of one key head are its rows."""
        shape, num_sequences = self._shape, tile.num_sequences
        blocks = layer_cache.view(-1, shape.block_size * shape.head_dim)
        gathered = blocks.index_select(0, tile.block_rows)
        keys, values = gathered.view(
            2, num_sequences, shape.num_kv_heads, -1, shape.head_dim
        ).unbind()
        folded = (
            queries.view(num_sequences, -1, shape.num_kv_heads, shape.group, shape.head_dim)
            .transpose(1, 2)
            .reshape(num_sequences, shape.num_kv_heads, -1, shape.head_dim)
        )
        answers = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=tile.sees)
        return (
            answers.reshape(num_sequences, shape.num_kv_heads, -1, shape.group * shape.head_dim)
            .transpose(1, 2)
            .reshape(queries.shape[0], -1)
        )


@dataclass(frozen=True, slots=True)
class _GatherDecode:
    attention: GatherAttention

    def plan(self, _spans: Sequence[Span], /) -> None:
        """Nothing: the graph reads positions and tables from its buffer."""

    def bind(self, positions: Tensor, tables: Tensor, /) -> Attend:
        """As ``GatherAttention.bind``."""
        return self.attention.bind(positions, tables)
