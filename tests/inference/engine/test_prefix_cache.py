"""Digests name a version, a tenant, and all tokens up to the end of a block; blocks behind others are forgotten first."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engine.prefix_cache import (
    BrokenCache,
    Chain,
    PrefixCache,
    extend_chain,
    start_chain,
)


def _chain(tokens: list[int], version: str = "v", salt: str = "") -> Chain:
    chain = start_chain(version, salt)
    extend_chain(chain, tokens, len(tokens) // 2, 2)
    return chain


@pytest.fixture
def cache() -> PrefixCache:
    """Block 1, behind it 2 and then 3, and also behind 1 block 4; all are held."""
    cache = PrefixCache()
    for block_id, digest, parent in ((1, b"a", None), (2, b"ab", 1), (3, b"abc", 2), (4, b"ad", 1)):
        cache.add(block_id, digest, parent)
    return cache


def test_a_digest_is_sha256_over_the_one_before_and_the_ids_in_32_bits() -> None:
    root = sha256(b"tatkal prefix 1version 7 sha-256salt 2 k1").digest()
    first = sha256(root + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()

    chain = start_chain("sha-256", "k1")
    extend_chain(chain, [1, 256, 3], 1, 2)

    assert chain == [root, first]


def test_a_chain_goes_on_where_it_ended() -> None:
    chain = start_chain("v", "")
    for num_blocks in (1, 1, 3):
        extend_chain(chain, [1, 2, 3, 4, 5, 6], num_blocks, 2)
    assert chain == _chain([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    "other",
    [
        _chain([1, 2, 3, 4], version="w"),
        _chain([1, 2, 3, 4], salt="k"),
        _chain([2, 1, 3, 4]),
        _chain([0, 2, 3, 4]),
    ],
)
def test_equal_tokens_behind_something_else_have_another_digest(other: Chain) -> None:
    assert _chain([1, 2, 3, 4])[2] != other[2]


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_version_and_tenant_never_run_into_each_other(
    version: str, salt: str, other_version: str, other_salt: str
) -> None:
    is_same = (version, salt) == (other_version, other_salt)
    assert (start_chain(version, salt) == start_chain(other_version, other_salt)) == is_same


def test_the_longest_known_beginning_is_found(cache: PrefixCache) -> None:
    assert cache.find([b"a", b"ab", b"abx", b"abc"]) == [1, 2]
    assert cache.find([b"x", b"a"]) == []
    assert (cache.num_blocks, cache.num_idle) == (4, 0)


def test_the_longest_idle_is_evicted_and_no_block_before_one_behind_it(cache: PrefixCache) -> None:
    for block_id in (4, 3, 2, 1):
        cache.rest(block_id)
    cache.wake(1)
    cache.wake(2)
    cache.rest(2)
    cache.rest(1)
    cache.check_integrity()
    assert [cache.evict() for _ in range(4)] == [4, 3, 2, 1]
    assert cache.num_blocks == 0


def test_to_forget_a_block_is_to_forget_all_behind_it(cache: PrefixCache) -> None:
    cache.rest(4)
    cache.rest(3)
    assert cache.forget([2, 99]) == [3]
    assert dict(cache.blocks) == {b"a": 1, b"ad": 4}
    assert cache.forget([1]) == [4]
    assert cache.num_blocks == cache.num_idle == 0
    cache.check_integrity()


@pytest.mark.parametrize(
    ("block_id", "digest", "parent"), [(1, b"new", None), (9, b"a", None), (9, b"new", 8)]
)
def test_a_block_is_cached_once_and_behind_a_cached_one(
    cache: PrefixCache, block_id: int, digest: bytes, parent: int | None
) -> None:
    with pytest.raises(BrokenCache):
        cache.add(block_id, digest, parent)


def test_integrity_finds_a_block_that_would_go_before_the_one_behind_it(cache: PrefixCache) -> None:
    for first, second in pairwise((1, 2)):
        cache.rest(first)
        cache.rest(second)
    with pytest.raises(BrokenCache, match="Block 1 would be evicted before"):
        cache.check_integrity()


def test_integrity_finds_a_block_that_nobody_can_reach(cache: PrefixCache) -> None:
    cache._drop(2)
    with pytest.raises(BrokenCache, match="Block 3 is cached and block 2 before it is not"):
        cache.check_integrity()
