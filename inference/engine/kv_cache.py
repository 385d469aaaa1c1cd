"""The key and value tensors: how many blocks fit, and the memory they live in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from inference.config import EngineConfig, InvalidConfig
from inference.engine.plan import Move, MoveKind
from inference.planner import memory as planner


def count_blocks(config: EngineConfig, *, max_model_len: int, bytes_per_block: int) -> int:
    """Blocks to allocate, with block 0 that nobody uses: ``num_blocks``, or what ``kv_cache_bytes`` hold.

    Never more than ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill.

    Raises:
        InvalidConfig: a prompt of one token and its answer of one do not fit.
    """
    size = bytes_per_block
    num_blocks = config.num_blocks or planner.blocks_in(config.kv_cache_bytes, size)
    needed = planner.fewest_blocks(config.block_size)
    if num_blocks < needed:
        asked = (
            f"num_blocks={config.num_blocks}"
            if config.num_blocks
            else f"kv_cache_bytes={config.kv_cache_bytes}"
        )
        raise InvalidConfig(
            f"{asked} gives {num_blocks} KV blocks of {size} bytes ({config.block_size} tokens each); "
            f"even the shortest sequence needs {needed}, of which one is reserved: {needed * size} bytes."
        )
    return planner.pool_blocks(config, max_model_len=max_model_len, block_bytes=size)


def count_standby_blocks(config: EngineConfig, *, num_blocks: int, bytes_per_block: int) -> int:
    """Blocks that a standby keeps of ``num_blocks``: what ``standby_kv_bytes`` hold, or one sequence if that is more."""
    return planner.standby_blocks(
        full=num_blocks,
        standby_bytes=config.standby_kv_bytes,
        block_bytes=bytes_per_block,
        block_size=config.block_size,
    )


def bytes_per_block(num_layers: int, block_shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return num_layers * math.prod(block_shape) * dtype.itemsize


class KVCache:
    """Keys and values of all layers, ``[num_layers, num_blocks, *block_shape]``.

    How a block looks inside is the model's affair. Block 0 stays zero: short block tables are filled up with it, and
    what is read there weighs nothing. The others hold anything until their owner writes them: the kernel gives memory
    when it is first written, so that a cache costs what is used of it, and to make one takes no time.

    Swap space is a tensor beside it with a slot in place of a block, in host memory: the same bytes lie in both. On
    a CUDA device its pages are pinned and one slot lies in one piece, so that a block is one transfer. The transfers of
    a step run in the order of the device's stream while the host makes the next; then it waits for all, once.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._block_shape = tuple(block_shape)
        self._num_layers = num_layers
        self._dtype = dtype
        self._device = device
        self.tensor = self._allocate(num_blocks)
        self._swapped: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of a layer, the reserved one included."""
        return self.tensor.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of the whole cache."""
        return self.tensor.nbytes

    @torch.inference_mode()
    def resize(self, num_blocks: int, kept: Sequence[int]) -> None:
        """Have ``num_blocks`` blocks from now on; those in ``kept`` hold what they held. Between steps only.

        Raises:
            MemoryError: there is no memory for it, and nothing changed.
        """
        tensor = self._allocate(num_blocks)
        if kept:
            self._copy_blocks(tensor, kept)
        self.tensor = tensor
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what a standby gives up, another process may take

    def resize_swap(self, num_slots: int) -> None:
        """Have ``num_slots`` slots of swap space from now on; what lay there is gone.

        Raises:
            MemoryError: there is no memory for it, and nothing changed.
        """
        self._swapped = self._allocate_swap(num_slots) if num_slots else None

    @torch.inference_mode()
    def move(self, moves: deque[Move]) -> int:
        """Make ``moves`` in their order, each taken out when it is made, and return how many there were."""
        count = len(moves)
        while moves:
            move = moves[0]
            source = self._side(is_swap=move.kind is MoveKind.SWAP_IN)
            target = self._side(is_swap=move.kind is MoveKind.SWAP_OUT)
            target[:, move.target].copy_(source[:, move.source], non_blocking=True)
            moves.popleft()
        if count and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return count

    def _copy_blocks(self, target: Tensor, kept: Sequence[int]) -> None:
        block_ids = torch.tensor(kept, device=self._device)
        for new, old in zip(target, self.tensor, strict=True):
            new.index_copy_(0, block_ids, old.index_select(0, block_ids))

    def _side(self, *, is_swap: bool) -> Tensor:
        if not is_swap:
            return self.tensor
        if self._swapped is None:
            raise RuntimeError("A block is to be swapped, and there is no swap space.")
        return self._swapped

    def _allocate_swap(self, num_slots: int) -> Tensor:
        try:
            slots = torch.empty(
                (num_slots, self._num_layers, *self._block_shape),
                dtype=self._dtype,
                pin_memory=self._device.type == "cuda",
            )
        except RuntimeError as error:
            raise MemoryError(f"no memory for {num_slots} swap slots: {error}") from error
        return slots.transpose(0, 1)

    def _allocate(self, num_blocks: int) -> Tensor:
        try:
            tensor = torch.empty(
                (self._num_layers, num_blocks, *self._block_shape),
                dtype=self._dtype,
                device=self._device,
            )
        except RuntimeError as error:  # what torch raises on every device
            raise MemoryError(f"no memory for {num_blocks} KV blocks: {error}") from error
        tensor[:, 0].zero_()
        return tensor
