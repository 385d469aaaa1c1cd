"""Where a request can begin: what others have computed of its tokens already."""

from __future__ import annotations

from dataclasses import dataclass

from inference.engine.block_pool import BlockPool
from inference.engine.prefix_cache import extend_chain
from inference.engine.request import Request, Status


@dataclass(frozen=True, slots=True)
class Start:
    """Blocks of others that hold the first ``num_tokens`` tokens of a request; the first ``num_kept`` are cached ones."""

    blocks: list[int]
    num_tokens: int
    num_kept: int


def find_start(request: Request, pool: BlockPool) -> Start:
    """The furthest start of ``request``: behind cached blocks, or behind the prompt of its first choice."""
    num_reusable, size = request.num_reusable_tokens, pool.block_size
    blocks: list[int] = []
    if request.chain:
        extend_chain(request.chain, request.tokens, num_reusable // size, size)
        blocks = pool.cache.find(request.chain[1 : 1 + num_reusable // size])
    parent, num_shared = request.parent, _count_shared(request)
    if parent is None or num_shared <= len(blocks) * size:
        return Start(blocks, len(blocks) * size, len(blocks))
    blocks = parent.block_table[: pool.blocks_for(num_shared)]
    return Start(blocks, num_shared, min(parent.num_kept_blocks, num_shared // size))


def _count_shared(request: Request) -> int:
    """How many tokens of its prompt ``request`` finds in the blocks of its first choice."""
    parent = request.parent
    if parent is None or parent.status is not Status.RUNNING or request.swap_slots:
        return 0
    num_common = min(request.num_prompt_tokens, request.num_reusable_tokens)
    return num_common if parent.num_computed_tokens >= num_common else 0
