"""Memory of the machine: what a version needs, what is there, and who goes first when it runs out.

It is asked before anything is allocated, because the kernel grants what it does not have and kills later. On a CUDA
device nothing is granted that is not there, so an allocation that fails says it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.config import ModelConfig

logger = logging.getLogger(__name__)

MARGIN_BYTES = 256 * 2**20
"""Activations, logits, the tokenizer, and what else a process takes while it serves."""

_MEBIBYTE = 2**20
_COMPLEX_SIZE = 8
_FLOAT_SIZE = 4
_MOST_LIKELY_VICTIM = 1000


class NotEnoughMemory(MemoryError):
    """A version that does not fit beside what runs already; the message has the numbers and the mend."""


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


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine holds now. Blocks are those that requests can have; the full number is what it may grow to."""

    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_full: int
    weight_bytes: int


def count_weight_bytes(model: ModelConfig, *, item_size: int, num_positions: int) -> int:
    """Bytes of a loaded decoder: weights of ``item_size`` bytes, and the table of its rotary embedding."""
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    attention = 2 * hidden * (queries + keys)
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    embeddings = (1 if model.tie_word_embeddings else 2) * model.vocab_size * hidden
    rotary = num_positions * (model.head_dim // 2) * _COMPLEX_SIZE
    return (model.num_layers * layer + embeddings + hidden) * item_size + rotary


def footprint(model: ModelConfig, *, weight_bytes: int, kv_bytes: int) -> Footprint:
    """What loading ``model`` takes; its largest weight is there three times while it is brought into shape."""
    rows = max(model.vocab_size, 2 * model.intermediate_size)
    return Footprint(
        weight_bytes, kv_bytes, MARGIN_BYTES + 2 * _FLOAT_SIZE * rows * model.hidden_size
    )


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


def available_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still take: of the machine, and of each control group it is in; None if nobody says.

    File pages that the kernel drops on demand count as available. ``root`` is where ``proc`` and ``sys`` lie.
    """
    rooms = [*_machine_room(root), *_group_rooms(root)]
    return max(min(rooms), 0) if rooms else None


def offer_to_oom_killer(extra: int, *, base: int, root: Path = Path("/")) -> None:
    """Let the kernel, out of memory, kill this process before those with a lower score; 0 takes the offer back."""
    score = min(base + extra, _MOST_LIKELY_VICTIM)
    try:
        (root / "proc/self/oom_score_adj").write_text(str(score), encoding="ascii")
    except OSError as error:
        logger.debug("score of the out-of-memory killer is as it was error=%s", error)


def oom_score(root: Path = Path("/")) -> int:
    """What whoever started this process set."""
    return _number(root / "proc/self/oom_score_adj") or 0


def _machine_room(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _group_rooms(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _rooms_up(root / "sys/fs/cgroup", path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms_up(root / "sys/fs/cgroup/memory", path, *names)


def _rooms_up(top: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """The room of a group and of all above it: each may have a limit. In a container only the top may be visible."""
    group = top / path.strip("/")
    for place in [group, *group.parents]:
        most, used = _number(place / limit), _number(place / usage)
        if most is not None and used is not None:
            yield most - used + _statistic(place / "memory.stat", reclaimable)
        if place == top:
            return


def _statistic(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[0] == name), 0)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or the word ``max`` in it."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MEBIBYTE:,.0f} MiB"
