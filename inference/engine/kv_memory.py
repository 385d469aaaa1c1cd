"""How much memory an engine's KV cache and swap space have: a standby's little, or all that was asked for."""

from __future__ import annotations

import logging

from inference.engine.block_pool import BlockPool
from inference.engine.parts import Parts, Sizes
from inference.engine.runner import Runner
from inference.engine.swap import SwapSpace
from inference.machine import available_bytes
from inference.models.cuda.device import free_bytes
from inference.planner.memory import MARGIN_BYTES, blocks_in

logger = logging.getLogger(__name__)


class KVMemory:
    """Grows and shrinks what the block pool counts and what the runner holds, together; between steps only.

    Held and cached blocks keep what they hold; cached ones beyond a standby's size are forgotten. Only a full cache
    has swap space, because only there a request gives way for good reason.
    """

    def __init__(self, parts: Parts, *, is_on_cpu: bool) -> None:
        self._runner: Runner = parts.runner
        self._pool: BlockPool = parts.pool
        self._swap: SwapSpace = parts.scheduler.swap
        self._sizes: Sizes = parts.sizes
        self._is_on_cpu = is_on_cpu

    def grow(self) -> bool:
        """As far as memory allows, but not by little: each time all that is used is copied.

        Returns:
            Whether the cache is full now. Ask again later: memory comes free.
        """
        before, full = self._pool.num_blocks, self._sizes.full_blocks
        if before < full and not self._resize_cache(
            before + self._count_affordable(full, self._free_bytes())
        ):
            return False
        is_full = self._pool.num_blocks == full
        if is_full and self._sizes.swap_slots and not self._swap.num_slots:
            self._open_swap()
        return is_full

    def shrink(self) -> bool:
        """To the size of a standby, without swap space; False while a block beyond it, or a swap slot, is held."""
        before, standby = self._pool.num_blocks, self._sizes.standby_blocks
        if self._swap.num_held or not self._pool.shrink(standby):
            return False
        try:
            if before > standby:
                self._runner.resize(standby, self._pool.used_blocks)
                logger.info("kv cache shrunk blocks=%d before=%d", standby, before)
        except MemoryError:
            self._pool.grow(before)
            return False
        self._swap.resize(0)
        self._runner.resize_swap(0)
        return True

    def _resize_cache(self, affordable: int) -> bool:
        before, full = self._pool.num_blocks, self._sizes.full_blocks
        wanted = min(full, affordable)
        if wanted < min(full, 2 * before):
            return False
        try:
            self._runner.resize(wanted, self._pool.used_blocks)
        except MemoryError:
            logger.exception("kv cache cannot grow blocks=%d wanted=%d", before, wanted)
            return False
        self._pool.grow(wanted)
        logger.info("kv cache grown blocks=%d before=%d full=%d", wanted, before, full)
        return True

    def _free_bytes(self) -> int | None:
        """What the cache may still take where it lies."""
        return available_bytes() if self._is_on_cpu else free_bytes(self._runner.device)

    def _count_affordable(self, most: int, available: int | None) -> int:
        if available is None:
            return most
        return min(most, blocks_in(available - MARGIN_BYTES, self._sizes.kv_block_bytes))

    def _open_swap(self) -> None:
        num_slots = self._count_affordable(self._sizes.swap_slots, available_bytes())
        try:
            self._runner.resize_swap(num_slots)
        except MemoryError:
            logger.exception("swap space cannot be opened slots=%d", num_slots)
            return
        self._swap.resize(num_slots)
