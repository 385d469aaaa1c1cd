"""Which KV blocks are free, which are cached, and how many sequences hold each of the others. Ids only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference.engine.prefix_cache import BrokenCache, PrefixCache
from inference.planner import memory as planner

NULL_BLOCK = 0
"""Never handed out: padded rows of a batch may write there, and nobody reads it."""


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free; ask ``num_free`` first."""


class BrokenPool(RuntimeError):
    """The accounts do not add up, so some sequence may read another's KV. Only a bug can cause it."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` token slots, block 0 reserved.

    Every other block is free, or held with a count of one or more (the number of block tables that name it), or
    idle: cached, so that a sequence that begins alike can have it again, and handed out like a free one when none is
    left, the longest idle first. Handing out and taking back cost O(1) per block. The pool may grow up to
    ``max_num_blocks`` (by default it never does) and shrink again, whoever holds blocks meanwhile.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, max_num_blocks: int | None = None
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks} must be at least 2: block {NULL_BLOCK} is reserved."
            )
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1.")
        self.num_blocks = num_blocks
        self.max_num_blocks = max(num_blocks, max_num_blocks or 0)
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._ref_counts[NULL_BLOCK] = 1
        # A stack: the block freed last is the one most likely still in a CPU cache. Lowest id on top.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self.cache = PrefixCache()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: those that are free, and those that are idle."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_held(self) -> int:
        """Blocks that some sequence holds; a shared block counts once, the null block never."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_slots(self) -> int:
        """Tokens that fit when one sequence has the whole pool, grown as far as it may."""
        return (self.max_num_blocks - planner.NUM_NULL_BLOCKS) * self.block_size

    @property
    def can_grow(self) -> bool:
        """Whether there are fewer blocks than there may be."""
        return self.num_blocks < self.max_num_blocks

    @property
    def used_blocks(self) -> list[int]:
        """The blocks whose content matters, because they are held or idle, in ascending order."""
        return [
            block_id
            for block_id, count in enumerate(self._ref_counts)
            if block_id and (count or self.cache.is_idle(block_id))
        ]

    def ref_count(self, block_id: int) -> int:
        """How many holders the block has; 0 means free or idle."""
        return self._ref_counts[block_id]

    def is_shared(self, block_id: int) -> bool:
        """Whether somebody else counts on what a held block holds, so that its holder may not write to it."""
        return self._ref_counts[block_id] > 1 or block_id in self.cache

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence fill, the last one perhaps in part."""
        return planner.blocks_for(num_tokens, self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one holder each, or none at all; idle ones are forgotten for it.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks were asked for, {self.num_free} are free.")
        block_ids = [self._free.pop() if self._free else self.cache.evict() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each of these held blocks.

        Raises:
            BrokenPool: a block is free or is no block of sequences.
        """
        for block_id in block_ids:
            self._check_held(block_id)
            self._ref_counts[block_id] += 1

    def reuse(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each of these blocks, held or idle.

        Raises:
            BrokenPool: a block is free or is no block of sequences.
        """
        for block_id in block_ids:
            if self.cache.is_idle(block_id):
                self.cache.wake(block_id)
            else:
                self._check_held(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one holder from each block of a table; one without holders can be handed out at once.

        From the end of the table: so of two idle blocks the one behind goes first.

        Raises:
            BrokenPool: a block is free already or is no block of sequences.
        """
        for block_id in reversed(block_ids):
            self._check_held(block_id)
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self.cache:
                self.cache.rest(block_id)
            else:
                self._free.append(block_id)

    def keep(self, block_id: int, digest: bytes, parent: int | None) -> int:
        """Cache a full block whose content ``digest`` names; ``parent`` is the cached block before it.

        Returns:
            The block to hold from now on. Where another one holds the same already, it is that one, and
            ``block_id`` is given back for it: two sequences that computed the same at once share it from here.
        """
        known = self.cache.get(digest)
        if known is None:
            self.cache.add(block_id, digest, parent)
            return block_id
        if known != block_id:
            self.reuse([known])
            self.release([block_id])
        return known

    def forget(self, block_ids: Iterable[int]) -> None:
        """Cache these blocks no longer, nor any behind them; whoever holds them keeps them."""
        self._free += self.cache.forget(block_ids)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks up to ``num_blocks``, behind those that were there.

        Raises:
            ValueError: that is fewer than now, or more than ``max_num_blocks``.
        """
        if not self.num_blocks <= num_blocks <= self.max_num_blocks:
            raise ValueError(
                f"num_blocks={num_blocks} must be {self.num_blocks} to {self.max_num_blocks}."
            )
        # Below what is free already, so that low ids go out first and the new ones can be taken away again.
        self._free = [*range(num_blocks - 1, self.num_blocks - 1, -1), *self._free]
        self._ref_counts += [0] * (num_blocks - self.num_blocks)
        self.num_blocks = num_blocks

    def shrink(self, num_blocks: int) -> bool:
        """Take away all blocks from ``num_blocks`` on; False, and nothing changed, while one of them is held.

        Idle ones among them are forgotten.

        Raises:
            ValueError: that is more than now, or too few for any sequence.
        """
        if not 2 <= num_blocks <= self.num_blocks:
            raise ValueError(f"num_blocks={num_blocks} must be 2 to {self.num_blocks}.")
        if any(self._ref_counts[num_blocks:]):
            return False
        self.forget(range(num_blocks, self.num_blocks))
        self._free = [block_id for block_id in self._free if block_id < num_blocks]
        del self._ref_counts[num_blocks:]
        self.num_blocks = num_blocks
        return True

    def check_integrity(self, block_tables: Iterable[Sequence[int]] = ()) -> None:
        """Compare the accounts with the tables of everyone who holds blocks; without tables, none may be held.

        O(num_blocks), about 10 ms at 100,000 blocks: meant for idle moments and tests.

        Raises:
            BrokenPool: a block is lost, free twice, free and held, or its count differs from its holders; or the
                cache does not hold together.
        """
        if len(self._ref_counts) != self.num_blocks:
            raise BrokenPool(f"{len(self._ref_counts)} counts for {self.num_blocks} blocks.")
        holders = [0] * self.num_blocks
        holders[NULL_BLOCK] = 1
        for table in block_tables:
            for block_id in table:
                holders[block_id] += 1
        places = self._places()
        for block_id, count in enumerate(self._ref_counts):
            if count != holders[block_id] or bool(places[block_id]) != (count == 0):
                raise BrokenPool(
                    f"Block {block_id} has count {count}, {holders[block_id]} holders, "
                    f"and is {places[block_id] or 'neither free nor idle'}."
                )

    def _places(self) -> list[str]:
        """Where each block without holders stands, empty for the others."""
        places = [""] * self.num_blocks
        for block_id in self._free:
            if places[block_id] or block_id in self.cache:
                raise BrokenPool(f"Block {block_id} is twice in the free list, or free and cached.")
            places[block_id] = "free"
        try:
            self.cache.check_integrity()
        except BrokenCache as error:
            raise BrokenPool(str(error)) from error
        for block_id in self.cache.blocks.values():
            if self.cache.is_idle(block_id):
                places[block_id] = "idle"
        return places

    def _check_held(self, block_id: int) -> None:
        if not NULL_BLOCK < block_id < self.num_blocks or self._ref_counts[block_id] == 0:
            raise BrokenPool(
                f"Block {block_id} is not held; held are some of 1 to {self.num_blocks - 1}."
            )
