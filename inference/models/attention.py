"""Paged attention in plain torch: keys and values are written by slot and read back by block table.

The new tokens of a step are cut into *tiles*: all sequences that decode and are about equally long share one, a chunk
of a prompt has tiles of its own. Each tile is gathered, multiplied and summed by the same few calls.

The answer of a token does not depend on the tile it stands in. Every query has its keys in whole splits of
``split_keys`` (what lies behind its last key weighs exactly zero), a sum over keys is taken split by split in order, and
a product has at least ``min_rows`` rows, because matrix libraries sum in another order below that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

MAX_TILE_QUERIES = 64
_SPLIT_KEYS = 128

_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the layers of a model and its cache have in common.

    The cache of one layer is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, keys before values: a block of
    one head is one contiguous row.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def split_keys(self) -> int:
        """Keys that are summed at once: whole blocks, about 128 tokens."""
        return max(_SPLIT_KEYS // self.block_size, 1) * self.block_size

    @property
    def min_rows(self) -> int:
        """Rows of a tile's product, from which on each has the same bits whatever their number.

        Measured with MKL in float32 for heads of 12 to 256: the last change of order lies at 2 to 12 rows and rises
        with the size of the head. Every row more costs time in each decode, so the margin is small.
        """
        return max(4, -(-self.head_dim // 16))


@dataclass(frozen=True, slots=True)
class Span:
    """``num_tokens`` new tokens of one sequence from position ``start``, which stand together in the step's batch.

    ``block_table`` covers all positions up to the last of them.
    """

    start: int
    num_tokens: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        """Positions that the last token sees."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries that are computed together.

    ``token_rows`` ``[num_sequences * num_queries]`` are rows of the step's batch, ``block_rows``
    ``[2 * num_sequences * num_kv_heads * num_blocks]`` rows of the cache, and ``bias``
    ``[num_sequences * num_kv_heads, num_rows, num_keys]`` is 0 where a query sees a key, else minus infinity.
    """

    num_sequences: int
    num_queries: int
    token_rows: Tensor
    block_rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the tokens of a step write their keys and values, and what they read.

    ``slot_rows`` ``[num_tokens * 2 * num_kv_heads]`` are rows of the cache seen as ``[..., head_dim]``; ``first_blocks``
    are those blocks whose first slot is written now.
    """

    shape: AttentionShape
    slot_rows: Tensor
    first_blocks: Tensor
    tiles: tuple[Tile, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, without padding."""
        return self.slot_rows.shape[0] // (2 * self.shape.num_kv_heads)

    @classmethod
    def from_spans(
        cls, shape: AttentionShape, spans: Sequence[Span], device: torch.device
    ) -> AttentionBatch:
        """The batch of a step whose tokens are those of ``spans``, in this order."""
        slots = np.concatenate([_slots(span, shape.block_size) for span in spans])
        blocks, offsets = np.divmod(slots, shape.block_size)
        heads = np.arange(2 * shape.num_kv_heads)
        slot_rows = (blocks[:, None] * heads.size + heads) * shape.block_size + offsets[
            :, None
        ]  # [num_tokens, 2 * num_kv_heads]
        return cls(
            shape=shape,
            slot_rows=torch.from_numpy(slot_rows.reshape(-1)).to(device),
            first_blocks=torch.from_numpy(blocks[offsets == 0]).to(device),
            tiles=tuple(_tiles(shape, spans, device)),
        )


def write_kv(layer_cache: Tensor, keys_values: Tensor, batch: AttentionBatch) -> None:
    """Store ``keys_values`` ``[num_tokens, 2 * num_kv_heads, head_dim]`` in the slots of the tokens."""
    head_dim = batch.shape.head_dim
    rows = keys_values.reshape(-1, head_dim).to(layer_cache.dtype)
    layer_cache.view(-1, head_dim).index_copy_(0, batch.slot_rows, rows)


def clear_blocks(cache: Tensor, block_ids: Tensor) -> None:
    """Make blocks of all layers zero before their first slot is written.

    What an earlier owner left behind has weight zero for the new one, but zero times its NaN would be NaN.
    """
    cache.index_fill_(1, block_ids, 0.0)


def attend(layer_cache: Tensor, queries: Tensor, batch: AttentionBatch) -> Tensor:
    """Softmax attention of float32 ``queries`` ``[num_rows, num_heads, head_dim]`` over what the cache holds.

    Returns:
        ``[num_rows, num_heads * head_dim]`` in float32; zero in rows that belong to no tile.
    """
    shape = batch.shape
    result = queries.new_zeros(queries.shape[0], shape.num_heads * shape.head_dim)
    block_rows = layer_cache.view(-1, shape.block_size * shape.head_dim)
    # Scaled here, exactly rounded: as a factor of the product it would be applied before or after the sum.
    queries = queries * shape.head_dim**-0.5
    for tile in batch.tiles:
        answers = _attend_tile(shape, tile, block_rows, queries.index_select(0, tile.token_rows))
        result.index_copy_(0, tile.token_rows, answers)
    return result


def _attend_tile(shape: AttentionShape, tile: Tile, block_rows: Tensor, queries: Tensor) -> Tensor:
    """Answers ``[num_sequences * num_queries, num_heads * head_dim]`` of the scaled ``queries``."""
    num_sequences, num_queries, head_dim = tile.num_sequences, tile.num_queries, shape.head_dim
    num_pairs, num_rows, num_keys = tile.bias.shape  # a pair is one sequence and one key head
    blocks = block_rows.index_select(0, tile.block_rows).to(queries.dtype)
    keys, values = blocks.view(2, num_pairs, num_keys, head_dim).unbind()
    folded = (
        queries.view(num_sequences, num_queries, shape.num_kv_heads, shape.group, head_dim)
        .transpose(1, 2)
        .reshape(num_pairs, num_queries * shape.group, head_dim)
    )
    num_used = folded.shape[1]
    if num_used < num_rows:
        folded = functional.pad(folded, (0, 0, 0, num_rows - num_used))
    scores = torch.baddbmm(tile.bias, folded, keys.transpose(1, 2))
    weights = scores.softmax(-1)  # [num_pairs, num_rows, num_keys]
    answers = _sum_in_order(weights, values, shape.split_keys)[:, :num_used]
    return (
        answers.reshape(num_sequences, shape.num_kv_heads, num_queries, -1)
        .transpose(1, 2)
        .reshape(num_sequences * num_queries, -1)
    )


def _sum_in_order(weights: Tensor, values: Tensor, split_keys: int) -> Tensor:
    """``weights @ values``, split by split: adding a split of zero weights changes no bit.

    In one product it would: MKL cuts 384 keys, 512 and 640 in different places, and sums the pieces.
    """
    total = torch.bmm(weights[:, :, :split_keys], values[:, :split_keys])
    for first in range(split_keys, values.shape[1], split_keys):
        split = slice(first, first + split_keys)
        total.baddbmm_(weights[:, :, split], values[:, split])
    return total


def _slots(span: Span, block_size: int) -> _Indices:
    positions = np.arange(span.start, span.end)
    table = np.asarray(span.block_table, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size


def _tiles(shape: AttentionShape, spans: Sequence[Span], device: torch.device) -> Iterator[Tile]:
    first_rows = [0, *accumulate(span.num_tokens for span in spans)]
    decoding: defaultdict[int, list[tuple[int, Span]]] = defaultdict(list)
    for row, span in zip(first_rows, spans, strict=False):
        if span.num_tokens == 1:
            num_splits = -(-span.end // shape.split_keys)
            # Within a factor of two, so that a long sequence does not make short ones gather as much as itself.
            decoding[num_splits.bit_length()].append((row, span))
        else:
            yield from _prompt_tiles(shape, span, row, device)
    for members in decoding.values():
        yield _decode_tile(shape, members, device)


def _decode_tile(
    shape: AttentionShape, members: Sequence[tuple[int, Span]], device: torch.device
) -> Tile:
    rows = np.array([row for row, _ in members])
    ends = np.array([span.end for _, span in members])
    tables = _padded_tables(shape, [span for _, span in members], int(ends.max()))
    hidden = np.arange(tables.shape[1] * shape.block_size) >= ends[:, None]
    bias = _bias(hidden).repeat_interleave(shape.num_kv_heads, 0)  # [num_pairs, num_keys]
    num_rows = max(shape.group, shape.min_rows)
    return Tile(
        num_sequences=len(members),
        num_queries=1,
        token_rows=torch.from_numpy(rows).to(device),
        block_rows=torch.from_numpy(_block_rows(shape, tables)).to(device),
        bias=bias.to(device)[:, None].expand(-1, num_rows, -1),
    )


def _prompt_tiles(
    shape: AttentionShape, span: Span, first_row: int, device: torch.device
) -> Iterator[Tile]:
    """Pieces of a chunk, so that the scores of a long one need not stand in memory at once."""
    for offset in range(0, span.num_tokens, MAX_TILE_QUERIES):
        num_queries = min(MAX_TILE_QUERIES, span.num_tokens - offset)
        start = span.start + offset
        tables = _padded_tables(shape, [span], start + num_queries)
        positions = np.arange(start, start + num_queries)
        hidden = np.arange(tables.shape[1] * shape.block_size) > positions[:, None]
        bias = _bias(hidden).repeat_interleave(shape.group, 0)  # [num_queries * group, num_keys]
        bias = functional.pad(bias, (0, 0, 0, max(shape.min_rows - bias.shape[0], 0)))
        row = first_row + offset
        yield Tile(
            num_sequences=1,
            num_queries=num_queries,
            token_rows=torch.arange(row, row + num_queries, device=device),
            block_rows=torch.from_numpy(_block_rows(shape, tables)).to(device),
            bias=bias.to(device).expand(shape.num_kv_heads, -1, -1),
        )


def _padded_tables(shape: AttentionShape, spans: Sequence[Span], num_keys: int) -> _Indices:
    """Block tables ``[num_sequences, num_blocks]`` for whole splits; block 0, which nobody writes, fills them up."""
    num_blocks = -(-num_keys // shape.split_keys) * (shape.split_keys // shape.block_size)
    tables = np.zeros((len(spans), num_blocks), dtype=np.int64)
    for table, span in zip(tables, spans, strict=True):
        used = min(-(-min(span.end, num_keys) // shape.block_size), num_blocks)
        table[:used] = span.block_table[:used]
    return tables


def _block_rows(shape: AttentionShape, tables: _Indices) -> _Indices:
    """Cache rows of the keys and then the values of every sequence, head and block."""
    heads = np.arange(2 * shape.num_kv_heads).reshape(2, 1, shape.num_kv_heads, 1)
    rows: _Indices = tables[None, :, None, :] * (2 * shape.num_kv_heads) + heads
    return rows.reshape(-1)


def _bias(hidden: npt.NDArray[np.bool_]) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), -torch.inf)
