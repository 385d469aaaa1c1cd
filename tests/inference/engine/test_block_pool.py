"""Every block is free or held, never both, never lost."""

from __future__ import annotations

import pytest

from inference.engine.block_pool import NULL_BLOCK, BlockPool, BrokenPool, OutOfBlocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=5, block_size=16)

    block_ids = pool.allocate(pool.num_free)

    assert sorted(block_ids) == [1, 2, 3, 4]
    assert NULL_BLOCK not in block_ids


def test_free_and_held_blocks_sum_to_all_but_the_null_block() -> None:
    pool = BlockPool(num_blocks=5, block_size=16)

    block_ids = pool.allocate(3)
    assert (pool.num_free, pool.num_held) == (1, 3)

    pool.release(block_ids[:2])
    assert (pool.num_free, pool.num_held) == (3, 1)


def test_a_pool_that_lacks_one_block_hands_out_none() -> None:
    pool = BlockPool(num_blocks=5, block_size=16)

    with pytest.raises(OutOfBlocks, match="5 blocks were asked for, 4 are free"):
        pool.allocate(5)

    assert pool.num_free == 4
    pool.check_integrity()


def test_a_released_block_is_free_at_once() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    block_ids = pool.allocate(1)

    pool.release(block_ids)

    assert pool.allocate(1) == block_ids


def test_a_shared_block_stays_held_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    block_ids = pool.allocate(1)
    pool.share(block_ids)

    pool.release(block_ids)
    assert pool.ref_count(block_ids[0]) == 1
    assert pool.num_free == 1

    pool.release(block_ids)
    assert pool.ref_count(block_ids[0]) == 0
    assert pool.num_free == 2


def test_releasing_a_free_block_is_refused() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    block_ids = pool.allocate(1)
    pool.release(block_ids)

    with pytest.raises(BrokenPool, match=f"Block {block_ids[0]} is not held"):
        pool.release(block_ids)

    pool.check_integrity()


def test_releasing_a_block_twice_in_one_call_is_refused() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    (block_id,) = pool.allocate(1)

    with pytest.raises(BrokenPool):
        pool.release([block_id, block_id])


@pytest.mark.parametrize("block_id", [NULL_BLOCK, -1, 3])
def test_the_null_block_and_unknown_blocks_can_be_neither_shared_nor_released(
    block_id: int,
) -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    pool.allocate(2)

    with pytest.raises(BrokenPool):
        pool.share([block_id])
    with pytest.raises(BrokenPool):
        pool.release([block_id])


def test_sharing_a_free_block_is_refused() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)

    with pytest.raises(BrokenPool):
        pool.share([1])


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)]
)
def test_the_last_block_of_a_sequence_may_be_partly_filled(
    num_tokens: int, num_blocks: int
) -> None:
    assert BlockPool(num_blocks=2, block_size=16).blocks_for(num_tokens) == num_blocks


def test_one_sequence_can_fill_every_slot_but_those_of_the_null_block() -> None:
    pool = BlockPool(num_blocks=5, block_size=16)

    assert pool.num_slots == 64
    assert pool.blocks_for(pool.num_slots) == pool.num_free


def test_integrity_holds_for_the_tables_of_all_holders() -> None:
    pool = BlockPool(num_blocks=6, block_size=16)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.share(first[:1])

    pool.check_integrity([first, [first[0], *second]])


def test_integrity_finds_a_block_that_nobody_holds_any_more() -> None:
    pool = BlockPool(num_blocks=6, block_size=16)
    first, second = pool.allocate(2), pool.allocate(1)

    with pytest.raises(BrokenPool, match=f"Block {second[0]} has count 1, 0 holders"):
        pool.check_integrity([first])


def test_integrity_finds_a_block_in_the_table_of_a_sequence_that_released_it() -> None:
    pool = BlockPool(num_blocks=6, block_size=16)
    table = pool.allocate(2)
    pool.release(table[1:])

    with pytest.raises(BrokenPool, match=f"Block {table[1]} has count 0, 1 holders"):
        pool.check_integrity([table])


def test_integrity_finds_the_null_block_in_a_table() -> None:
    pool = BlockPool(num_blocks=6, block_size=16)

    with pytest.raises(BrokenPool, match="Block 0"):
        pool.check_integrity([[NULL_BLOCK]])


def test_integrity_finds_a_block_that_is_twice_in_the_free_list() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    pool._free.append(pool._free[0])

    with pytest.raises(BrokenPool, match="twice in the free list"):
        pool.check_integrity()


def test_integrity_finds_a_block_that_is_free_and_held() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    table = pool.allocate(1)
    pool._free.append(table[0])

    with pytest.raises(BrokenPool, match="and is free"):
        pool.check_integrity([table])


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "said"),
    [(1, 16, "num_blocks=1"), (0, 16, "num_blocks=0"), (2, 0, "block_size=0")],
)
def test_a_pool_without_a_usable_slot_is_refused(
    num_blocks: int, block_size: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        BlockPool(num_blocks, block_size)


def test_a_pool_that_grows_hands_out_its_old_blocks_first() -> None:
    pool = BlockPool(num_blocks=4, block_size=16, max_num_blocks=7)
    held = pool.allocate(1)
    assert pool.can_grow

    pool.grow(7)

    assert not pool.can_grow
    assert (pool.num_free, pool.num_held) == (5, 1)
    assert pool.allocate(5) == [2, 3, 4, 5, 6]
    pool.check_integrity([held, [2, 3, 4, 5, 6]])


def test_a_pool_shrinks_only_when_what_it_loses_is_free() -> None:
    pool = BlockPool(num_blocks=7, block_size=16)
    table = pool.allocate(4)

    assert not pool.shrink(4)
    pool.check_integrity([table])
    pool.release(table[3:])
    assert pool.used_blocks == [1, 2, 3]

    assert pool.shrink(4)
    assert (pool.num_blocks, pool.num_free, pool.num_held) == (4, 0, 3)
    pool.check_integrity([table[:3]])


def test_what_one_sequence_can_fill_is_told_for_the_grown_pool() -> None:
    pool = BlockPool(num_blocks=3, block_size=16, max_num_blocks=5)
    assert pool.num_slots == 64
    assert pool.num_free == 2


@pytest.mark.parametrize("num_blocks", [3, 8])
def test_a_pool_grows_within_its_bounds(num_blocks: int) -> None:
    pool = BlockPool(num_blocks=4, block_size=16, max_num_blocks=7)
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} must be 4 to 7"):
        pool.grow(num_blocks)


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_a_pool_shrinks_within_its_bounds(num_blocks: int) -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} must be 2 to 4"):
        pool.shrink(num_blocks)


def test_integrity_finds_a_count_without_a_block() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    pool._ref_counts.append(0)
    with pytest.raises(BrokenPool, match="5 counts for 4 blocks"):
        pool.check_integrity()


def _pool_with_an_idle_prompt(num_blocks: int = 6) -> BlockPool:
    """Blocks 1, 2 and 3 hold a prompt that nobody has any more."""
    pool = BlockPool(num_blocks, block_size=16, max_num_blocks=8)
    table = pool.allocate(3)
    for index, digest in enumerate((b"a", b"ab", b"abc")):
        assert pool.keep(table[index], digest, table[index - 1] if index else None) == table[index]
    pool.release(table)
    return pool


def test_idle_blocks_count_as_free_and_go_after_the_free_ones_from_the_end() -> None:
    pool = _pool_with_an_idle_prompt()
    assert (pool.num_free, pool.num_held, pool.used_blocks) == (5, 0, [1, 2, 3])
    assert pool.allocate(4) == [4, 5, 3, 2]
    assert pool.cache.find([b"a", b"ab"]) == [1]
    pool.check_integrity([[4, 5, 3, 2]])
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)


def test_a_block_in_use_again_is_held_until_all_have_released_it() -> None:
    pool = _pool_with_an_idle_prompt()
    pool.reuse([1, 2])
    pool.reuse([1])
    assert (pool.num_held, pool.ref_count(1), pool.is_shared(2)) == (2, 2, True)
    pool.release([1, 2])
    assert (pool.num_held, pool.cache.is_idle(2)) == (1, True)
    pool.check_integrity([[1]])
    with pytest.raises(BrokenPool, match="Block 5 is not held"):
        pool.reuse([5])


def test_who_computed_what_is_cached_already_gets_the_cached_block() -> None:
    pool = _pool_with_an_idle_prompt()
    [own] = pool.allocate(1)
    assert pool.keep(own, b"a", None) == 1
    assert (pool.ref_count(own), pool.ref_count(1)) == (0, 1)
    pool.check_integrity([[1]])


def test_a_shrinking_pool_forgets_what_it_loses_and_what_lies_behind_it() -> None:
    pool = BlockPool(6, block_size=16)
    table = pool.allocate(5)
    pool.keep(5, b"a", None)
    pool.keep(1, b"ab", 5)
    pool.keep(2, b"x", None)
    pool.release(table)
    assert pool.shrink(4)
    assert (pool.num_free, dict(pool.cache.blocks)) == (3, {b"x": 2})
    pool.check_integrity()


def test_a_pool_that_grows_keeps_what_is_cached() -> None:
    pool = _pool_with_an_idle_prompt()
    pool.grow(8)
    assert (pool.num_free, pool.used_blocks) == (7, [1, 2, 3])
    pool.check_integrity()


def test_integrity_finds_a_block_that_is_free_and_cached() -> None:
    pool = _pool_with_an_idle_prompt()
    pool._free.append(2)
    with pytest.raises(BrokenPool, match="Block 2 is twice in the free list, or free and cached"):
        pool.check_integrity()
