"""The key and value tensors: how many blocks fit, and the memory they live in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inference.config import EngineConfig, InvalidConfig

STANDBY_TOKENS = 512
"""A standby can hold one sequence of this length, however large its tokens are."""


def count_blocks(config: EngineConfig, *, max_model_len: int, bytes_per_block: int) -> int:
    """Blocks to allocate, with block 0 that nobody uses: ``num_blocks``, or what ``kv_cache_bytes`` hold.

    Never more than ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill.

    Raises:
        InvalidConfig: a prompt of one token and its answer of one do not fit.
    """
    size = bytes_per_block
    num_blocks = config.num_blocks or config.kv_cache_bytes // size
    needed = 1 + -(-2 // config.block_size)
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
    return min(num_blocks, 1 + config.max_num_seqs * -(-max_model_len // config.block_size))


def count_standby_blocks(config: EngineConfig, *, num_blocks: int, bytes_per_block: int) -> int:
    """Blocks that a standby keeps of ``num_blocks``: what ``standby_kv_bytes`` hold, or one sequence if that is more."""
    one_sequence = 1 + -(-STANDBY_TOKENS // config.block_size)
    return min(num_blocks, max(config.standby_kv_bytes // bytes_per_block, one_sequence))


def bytes_per_block(num_layers: int, block_shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return num_layers * math.prod(block_shape) * dtype.itemsize


class KVCache:
    """Keys and values of all layers, ``[num_layers, num_blocks, *block_shape]``.

    How a block looks inside is the model's affair. Block 0 stays zero: short block tables are filled up with it, and
    what is read there weighs nothing. The others hold anything until their owner writes them: the kernel gives memory
    when it is first written, so that a cache costs what is used of it, and to make one takes no time.
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
            block_ids = torch.tensor(kept, device=self._device)
            for layer, old in zip(tensor, self.tensor, strict=True):
                layer.index_copy_(0, block_ids, old.index_select(0, block_ids))
        self.tensor = tensor

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
