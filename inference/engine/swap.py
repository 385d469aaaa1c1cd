"""Where the blocks of preempted requests wait for their return, and when that is cheaper than to compute them again.

Swap space is host memory outside the KV cache, of the same geometry, in slots of one block each. For a model on a CUDA
device that is what it says. For one on the CPU both are the same memory: there swap space is a second pool, with a
bound of its own, that no running request can have, so that what was computed survives a crowd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inference.engine.plan import StepPlan

_FORGETTING = 0.8
_FIRST_COPY_BYTES_PER_S = 2e9


class SwapSpace:
    """Slots of swap space. Ids only, no tensors; it may be opened and closed while nobody has a slot."""

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots that hold a block."""
        return self.num_slots - len(self._free)

    def resize(self, num_slots: int) -> bool:
        """Have ``num_slots`` slots; False, and nothing changed, while one is held."""
        if self.num_held:
            return False
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        return True

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` slots, or none if fewer are free."""
        if count > len(self._free):
            return []
        return [self._free.pop() for _ in range(count)]

    def release(self, slots: Iterable[int]) -> None:
        """Take slots back."""
        self._free.extend(slots)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Compare with the slots of everyone who has some.

        Raises:
            RuntimeError: a slot is lost, free twice, or free and held.
        """
        held = [slot for slots in holders for slot in slots]
        if sorted([*held, *self._free]) != list(range(self.num_slots)):
            raise RuntimeError(
                f"Of {self.num_slots} swap slots {sorted(held)} are held, {sorted(self._free)} free."
            )


@dataclass(slots=True)
class PreemptionCosts:
    """What it takes to bring a preempted request back: by copies, or by computing it again.

    To swap costs ``2 * blocks * block_bytes / copy_bytes_per_s`` (out now, in later), to recompute
    ``tokens / prefill_tokens_per_s``. Both rates are measured while the engine runs, older measurements weigh less. Before
    anything was computed nothing is known of the prefill, and nothing is worth a copy.

    Source: Kwon et al. (2023), arXiv:2309.06180, sections 4.5 and 7.3, which measure that neither is always cheaper:
    many tokens to the byte favour a copy, small blocks over a slow bus favour computing.
    """

    block_bytes: int = 1
    copy_bytes_per_s: float = _FIRST_COPY_BYTES_PER_S
    prefill_tokens_per_s: float = float("inf")
    _tokens: float = 0.0
    _token_seconds: float = 0.0
    _bytes: float = 0.0
    _byte_seconds: float = 0.0

    def prefer_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether ``num_tokens`` computed tokens in ``num_blocks`` blocks should be copied and not computed again."""
        copy_s = 2 * num_blocks * self.block_bytes / self.copy_bytes_per_s
        return copy_s < num_tokens / self.prefill_tokens_per_s

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """``plan`` was computed. It counts if it mostly filled prompts, since that is what computing again does."""
        num_prefilled = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        if not num_prefilled or 2 * num_prefilled < plan.num_tokens:
            return
        self._tokens = _FORGETTING * self._tokens + plan.num_tokens
        self._token_seconds = _FORGETTING * self._token_seconds + seconds
        if self._token_seconds > 0:
            self.prefill_tokens_per_s = self._tokens / self._token_seconds

    def observe_moves(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were copied."""
        if not num_blocks:
            return
        self._bytes = _FORGETTING * self._bytes + num_blocks * self.block_bytes
        self._byte_seconds = _FORGETTING * self._byte_seconds + seconds
        if self._byte_seconds > 0:
            self.copy_bytes_per_s = self._bytes / self._byte_seconds
