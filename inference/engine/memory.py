"""Memory of this process: what a version needs against what is there, and who goes first when it runs out.

It is asked before anything is allocated, because the kernel grants what it does not have and kills later. How much a
version needs is reckoned by ``inference.planner.memory``, what is there told by ``inference.machine``, or by a CUDA device of
its own memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from inference.planner.memory import MIB, Footprint

logger = logging.getLogger(__name__)

_MOST_LIKELY_VICTIM = 1000


class NotEnoughMemory(MemoryError):
    """A version that does not fit beside what runs already; the message has the numbers and the mend."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine holds now. Blocks are those that requests can have; the full number is what it may grow to.

    ``kv_blocks_cached`` nobody holds, and they can be used again as they are or be given away. ``num_preemptions``, of
    which ``num_swaps`` kept what was computed, are since the engine was loaded.
    """

    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_full: int
    weight_bytes: int
    kv_blocks_cached: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0


def check_fits(needed: Footprint, available: int | None) -> None:
    """Return if ``needed`` is there; unknown counts as there.

    Raises:
        NotEnoughMemory: it is not.
    """
    if available is not None and needed.total > available:
        raise NotEnoughMemory(
            f"it needs {_mib(needed.total)} (weights {_mib(needed.weights)}, KV cache {_mib(needed.kv_cache)}, "
            f"working space {_mib(needed.working)}), and {_mib(available)} are available. Give this machine "
            "or container more memory, let other versions go, or register it with a smaller max_model_len."
        )


def offer_to_oom_killer(extra: int, *, base: int, root: Path = Path("/")) -> None:
    """Let the kernel, out of memory, kill this process before those with a lower score; 0 takes the offer back."""
    score = min(base + extra, _MOST_LIKELY_VICTIM)
    try:
        (root / "proc/self/oom_score_adj").write_text(str(score), encoding="ascii")
    except OSError as error:
        logger.debug("score of the out-of-memory killer is as it was error=%s", error)


def oom_score(root: Path = Path("/")) -> int:
    """What whoever started this process set."""
    try:
        return int((root / "proc/self/oom_score_adj").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"
