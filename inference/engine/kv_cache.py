"""The key and value tensors: how many blocks fit, and the memory they live in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.config import EngineConfig, InvalidConfig, ModelConfig
from inference.models.attention import AttentionShape

STANDBY_TOKENS = 512
"""A standby can hold one sequence of this length, however large its tokens are."""


def bytes_per_block(model: ModelConfig, *, block_size: int, item_size: int) -> int:
    """Bytes of one block over all layers: keys and values of ``block_size`` tokens."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * item_size


def count_blocks(
    config: EngineConfig, model: ModelConfig, *, max_model_len: int, item_size: int
) -> int:
    """Blocks to allocate, with block 0 that nobody uses: ``num_blocks``, or what ``kv_cache_bytes`` hold.

    Never more than ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill.

    Raises:
        InvalidConfig: a prompt of one token and its answer of one do not fit.
    """
    size = bytes_per_block(model, block_size=config.block_size, item_size=item_size)
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


def count_standby_blocks(
    config: EngineConfig, model: ModelConfig, *, num_blocks: int, item_size: int
) -> int:
    """Blocks that a standby keeps of ``num_blocks``: what ``standby_kv_bytes`` hold, or one sequence if that is more."""
    size = bytes_per_block(model, block_size=config.block_size, item_size=item_size)
    one_sequence = 1 + -(-STANDBY_TOKENS // config.block_size)
    return min(num_blocks, max(config.standby_kv_bytes // size, one_sequence))


class KVCache:
    """Keys and values of all layers, ``[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]``.

    Block 0 stays zero: short block tables are filled up with it, and what is read there weighs nothing. The others
    hold anything until they are cleared for an owner: the kernel gives memory when it is first written, so that a
    cache costs what is used of it, and to make one takes no time.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if block_size & (block_size - 1):
            # Sums over keys go in splits of 128; in other sizes their order would depend on the sequence's length.
            raise InvalidConfig(f"block_size={block_size} must be a power of two.")
        self.shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, block_size)
        self._block_shape = (2, model.num_kv_heads, block_size, model.head_dim)
        self._num_layers = model.num_layers
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

    def clear(self, block_ids: Tensor) -> None:
        """Make blocks zero before their first slot is written.

        What an earlier owner left behind has weight zero for the new one, but zero times its NaN would be NaN.
        """
        self.tensor.index_fill_(1, block_ids, 0.0)

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
