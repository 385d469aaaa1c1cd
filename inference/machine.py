"""What the machine says of itself: memory that may still be taken, memory in all, caches, its processor's name.

Each function takes ``root``, where ``proc`` and ``sys`` lie, and answers None or 0 where nobody says.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def available_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still take: of the machine, and of each control group it is in; None if nobody says.

    File pages that the kernel drops on demand count as available. ``root`` is where ``proc`` and ``sys`` lie.
    """
    rooms = [*_machine_room(root), *_group_rooms(root)]
    return max(min(rooms), 0) if rooms else None


def total_bytes(root: Path = Path("/")) -> int:
    """All memory that processes here can ever have: the machine's, or the least that a control group may use."""
    physical = next(_meminfo(root, "MemTotal"), 0)
    limits = [most for most in _group_limits(root) if 0 < most < physical]
    return min([physical, *limits])


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Size of the largest cache that the first processor reads through."""
    folder = root / "sys/devices/system/cpu/cpu0/cache"
    return max((_size(path) for path in folder.glob("index*/size")), default=0)


def processor_name(root: Path = Path("/")) -> str:
    """As the maker calls it."""
    named = (line for line in _lines(root / "proc/cpuinfo") if line.startswith("model name"))
    return next(named, f": {platform.machine()}").partition(":")[2].strip()


def count_processors() -> int:
    """Those that this process may use, where the system tells (macOS does not)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine_room(root: Path) -> Iterator[int]:
    yield from _meminfo(root, "MemAvailable")


def _meminfo(root: Path, wanted: str) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == wanted:
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


def _group_limits(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits_up(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_up(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")


def _limits_up(top: Path, path: str, limit: str) -> Iterator[int]:
    for place in _groups_up(top, path):
        if (most := _number(place / limit)) is not None:
            yield most


def _rooms_up(top: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """The room of a group and of all above it: each may have a limit. In a container only the top may be visible."""
    for place in _groups_up(top, path):
        most, used = _number(place / limit), _number(place / usage)
        if most is not None and used is not None:
            yield most - used + _statistic(place / "memory.stat", reclaimable)


def _groups_up(top: Path, path: str) -> Iterator[Path]:
    group = top / path.strip("/")
    for place in [group, *group.parents]:
        yield place
        if place == top:
            return


def _statistic(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[0] == name), 0)


def _size(path: Path) -> int:
    text = "".join(_lines(path)).strip()
    return int(text[:-1]) * _UNITS[text[-1]] if text[:-1].isdigit() and text[-1] in _UNITS else 0


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or the word ``max`` in it."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
