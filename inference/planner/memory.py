"""How many bytes, and so how many sequences: the arithmetic that the engine's own admission and sizing use.

Keys and values live in blocks of a fixed number of tokens, so that a sequence wastes at most its last block.
Source: Kwon et al. (2023), "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP '23, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from inference.config import EngineConfig, ModelConfig
from inference.planner.shape import BITS, ModelShape

MIB: Final = 2**20
NUM_NULL_BLOCKS: Final = 1
"""Blocks of a pool that no sequence gets: short block tables are filled up with block 0."""

STANDBY_TOKENS: Final = 512
"""A standby can hold one sequence of this length, however large its tokens are."""

MARGIN_BYTES: Final = 256 * MIB
"""Activations, logits, the tokenizer, and what else a process takes while it serves."""

MAX_HEADROOM: Final = 0.2

_COMPLEX_SIZE = 8
_FLOAT_SIZE = 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a version takes from the moment it is loaded, and for a moment while it is."""

    weights: int
    kv_cache: int
    working: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.weights + self.kv_cache + self.working


# ------------------------------------------------------------------------------------------------- keys and values


def kv_bytes_per_token(shape: ModelShape, kv: str) -> int:
    """Bytes of the keys and values of one token in every layer.

    Heads of queries that share their keys (grouped-query attention) share these bytes.
    """
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * BITS[kv] // 8


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens of one sequence fill, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def blocks_in(num_bytes: float, block_bytes: int) -> int:
    """Whole blocks that fit into ``num_bytes``; none where there is less than nothing."""
    return max(int(num_bytes // block_bytes), 0)


def blocks_of(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks that as many sequences as may run can fill at most, with the null block."""
    return NUM_NULL_BLOCKS + max_num_seqs * blocks_for(max_model_len, block_size)


def pool_blocks(config: EngineConfig, *, max_model_len: int, block_bytes: int) -> int:
    """Blocks that an engine of these settings allocates in full, the null block included."""
    wanted = config.num_blocks or blocks_in(config.kv_cache_bytes, block_bytes)
    return min(wanted, blocks_of(config.max_num_seqs, max_model_len, config.block_size))


def fewest_blocks(block_size: int) -> int:
    """Below this no sequence can run: a prompt of one token and its answer of one, with the null block."""
    return NUM_NULL_BLOCKS + blocks_for(2, block_size)


def standby_blocks(*, full: int, standby_bytes: int, block_bytes: int, block_size: int) -> int:
    """Blocks that a standby keeps of ``full``: what ``standby_bytes`` hold, or one sequence if that is more."""
    one_sequence = NUM_NULL_BLOCKS + blocks_for(STANDBY_TOKENS, block_size)
    return min(full, max(blocks_in(standby_bytes, block_bytes), one_sequence))


def can_admit(missing: int, *, num_free: int, num_running: int) -> bool:
    """Whether a sequence that needs ``missing`` blocks joins ``num_running`` others: it leaves a free one for each.

    Without that reserve, a sequence would be admitted into the last free blocks, lose them in the next steps to those
    that decode, and be computed again and again.
    """
    reserve = num_running + 1 if num_running else 0
    return missing + reserve <= num_free


def count_sequences(num_blocks: int, *, num_tokens: int, block_size: int) -> int:
    """How many sequences of ``num_tokens`` tokens a pool of ``num_blocks`` blocks, null block included, runs at once.

    It is what ``can_admit`` lets in one after the other: the n-th needs its own blocks and n free ones.
    """
    each, usable = blocks_for(num_tokens, block_size), num_blocks - NUM_NULL_BLOCKS
    if usable < each:
        return 0
    return max(usable // (each + 1), 1)


# --------------------------------------------------------------------------------------------------------- weights


def decoder_bytes(model: ModelConfig, *, item_size: int, num_positions: int) -> int:
    """Bytes of a loaded decoder: weights of ``item_size`` bytes, and the table of its rotary embedding."""
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    attention = 2 * hidden * (queries + keys)
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    embeddings = (1 if model.tie_word_embeddings else 2) * model.vocab_size * hidden
    rotary = num_positions * (model.head_dim // 2) * _COMPLEX_SIZE
    return (model.num_layers * layer + embeddings + hidden) * item_size + rotary


def packed_decoder_bytes(
    model: ModelConfig, *, stored_bytes: int, item_size: int, num_positions: int
) -> int:
    """Bytes of a loaded decoder at most whose integers stay as stored, except embedding and head, which are widened."""
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    rotary = num_positions * (model.head_dim // 2) * _COMPLEX_SIZE
    return stored_bytes + tables * item_size + rotary


def load_footprint(model: ModelConfig, *, weight_bytes: int, kv_bytes: int) -> Footprint:
    """What loading ``model`` takes; its largest weight is there three times while it is brought into shape."""
    rows = max(model.vocab_size, 2 * model.intermediate_size)
    working = MARGIN_BYTES + 2 * _FLOAT_SIZE * rows * model.hidden_size
    return Footprint(weight_bytes, kv_bytes, working)
