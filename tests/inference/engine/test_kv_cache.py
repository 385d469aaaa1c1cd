"""How many blocks fit, what is refused, and what a block holds when it changes hands."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.config import EngineConfig, InvalidConfig, ModelConfig
from inference.engine.kv_cache import (
    KVCache,
    bytes_per_block,
    count_blocks,
    count_standby_blocks,
)
from inference.engine.plan import Move, MoveKind

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    eos_token_ids=(2,),
)


def _count(**options: Any) -> int:
    config = EngineConfig(Path("unused"), **options)
    return count_blocks(
        config, max_model_len=2048, bytes_per_block=_bytes_per_block(config.block_size)
    )


def _block_shape(block_size: int) -> tuple[int, ...]:
    return (2, SMOLLM2.num_kv_heads, block_size, SMOLLM2.head_dim)


def _bytes_per_block(block_size: int, dtype: torch.dtype = torch.bfloat16) -> int:
    return bytes_per_block(SMOLLM2.num_layers, _block_shape(block_size), dtype)


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    # 2 * 30 layers * 3 heads * 64 dimensions * 2 bytes = 23,040 bytes a token.
    assert _bytes_per_block(1) == 23_040
    assert _bytes_per_block(16, torch.float32) == 16 * 46_080


def test_the_tensor_has_the_size_that_was_reckoned() -> None:
    cache = KVCache(
        num_layers=30,
        num_blocks=3,
        block_shape=_block_shape(16),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert cache.num_bytes == 3 * _bytes_per_block(16)


def test_the_bytes_decide_how_many_blocks_there_are() -> None:
    assert _count(kv_cache_bytes=100 * 16 * 23_040) == 100
    assert _count(kv_cache_bytes=100 * 16 * 23_040 - 1) == 99


def test_a_number_of_blocks_overrides_the_bytes() -> None:
    assert _count(kv_cache_bytes=1, num_blocks=7) == 7


def test_no_more_blocks_than_all_sequences_can_fill() -> None:
    assert _count(kv_cache_bytes=2**40, max_num_seqs=4) == 1 + 4 * 128


def test_a_pool_without_room_for_one_sequence_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidConfig, match=r"kv_cache_bytes=737279 .* needs 2, .* 737280 bytes"):
        _count(kv_cache_bytes=2 * 16 * 23_040 - 1)
    with pytest.raises(InvalidConfig, match=r"num_blocks=2 gives 2 .* needs 3"):
        _count(num_blocks=2, block_size=1)
    assert _count(kv_cache_bytes=2 * 16 * 23_040) == 2


def _count_standby(num_blocks: int = 10_000, **options: Any) -> int:
    config = EngineConfig(Path("unused"), **options)
    return count_standby_blocks(config, num_blocks=num_blocks, bytes_per_block=16 * 23_040)


def test_a_standby_keeps_what_its_bytes_hold() -> None:
    assert _count_standby() == 64 * 2**20 // (16 * 23_040) == 182
    assert _count_standby(standby_kv_bytes=100 * 16 * 23_040) == 100


def test_a_standby_can_hold_a_sequence_of_reasonable_length() -> None:
    assert _count_standby(standby_kv_bytes=1) == 1 + 512 // 16


def test_a_standby_keeps_no_more_than_there_is() -> None:
    assert _count_standby(num_blocks=7) == 7


def test_kept_blocks_hold_what_they_held_in_a_cache_of_another_size() -> None:
    cache = KVCache(
        num_layers=3,
        num_blocks=4,
        block_shape=(2, 5),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.tensor.copy_(torch.rand_like(cache.tensor))
    before = cache.tensor.clone()
    cache.resize(9, [1, 3])
    assert cache.num_blocks == 9
    assert torch.equal(cache.tensor[:, [1, 3]], before[:, [1, 3]])
    assert not cache.tensor[:, 0].any()
    cache.resize(4, [3])
    assert cache.num_blocks == 4
    assert torch.equal(cache.tensor[:, 3], before[:, 3])


@pytest.fixture
def numbered() -> KVCache:
    """Two layers of five blocks, each with numbers of its own, and three swap slots."""
    cache = KVCache(
        num_layers=2,
        num_blocks=5,
        block_shape=(3, 4),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    cache.tensor.copy_(torch.arange(2 * 5 * 12).view(2, 5, 3, 4))
    cache.resize_swap(3)
    return cache


def test_moves_are_made_in_their_order_each_once(numbered: KVCache) -> None:
    before = numbered.tensor.clone()
    moves = deque(
        [
            Move(MoveKind.SWAP_OUT, 2, 1),
            Move(MoveKind.COPY, 3, 2),
            Move(MoveKind.COPY, 2, 4),
            Move(MoveKind.SWAP_IN, 1, 3),
        ]
    )
    assert numbered.move(moves) == 4
    assert not moves
    after = numbered.tensor
    for block_id, source in ((1, 1), (2, 3), (3, 2), (4, 3)):
        assert torch.equal(after[:, block_id], before[:, source])
    assert numbered.move(moves) == 0


def test_a_move_that_fails_stays_with_those_behind_it(numbered: KVCache) -> None:
    moves = deque([Move(MoveKind.COPY, 1, 2), Move(MoveKind.SWAP_OUT, 1, 7)])
    with pytest.raises(IndexError):
        numbered.move(moves)
    assert list(moves) == [Move(MoveKind.SWAP_OUT, 1, 7)]


def test_without_swap_space_nothing_can_be_swapped(numbered: KVCache) -> None:
    numbered.resize_swap(0)
    with pytest.raises(RuntimeError, match="there is no swap space"):
        numbered.move(deque([Move(MoveKind.SWAP_OUT, 1, 0)]))


def test_swapped_blocks_survive_a_cache_that_is_resized(numbered: KVCache) -> None:
    expected = numbered.tensor[:, 2].clone()
    numbered.move(deque([Move(MoveKind.SWAP_OUT, 2, 0)]))
    numbered.resize(9, [])
    numbered.move(deque([Move(MoveKind.SWAP_IN, 0, 8)]))
    assert torch.equal(numbered.tensor[:, 8], expected)
