"""What a machine says of itself: memory and caches, with control groups of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.machine import (
    available_bytes,
    last_level_cache_bytes,
    processor_name,
    total_bytes,
)

GIB = 2**30
NO_LIMIT_V1 = 2**63 - 4096


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root directory whose machine has 8 GiB available."""
    _write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {8 * 2**20} kB\n")
    return tmp_path


def _write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _v2(root: Path, group: str, limit: object, used: int, reclaimable: int = 0) -> None:
    place = root / "sys/fs/cgroup" / group
    _write(place / "memory.max", limit)
    _write(place / "memory.current", used)
    _write(place / "memory.stat", f"anon 5\ninactive_file {reclaimable}\nactive_file 7")


def test_without_a_control_group_the_machine_decides(machine: Path) -> None:
    assert available_bytes(machine) == 8 * GIB


def test_nobody_knows_on_a_machine_without_proc(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_a_control_group_bounds_the_machine(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/serving/engine")
    _v2(machine, "serving/engine", 4 * GIB, 3 * GIB, reclaimable=GIB)
    assert available_bytes(machine) == 2 * GIB


def test_a_group_further_up_may_be_the_tightest(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/serving/engine")
    _v2(machine, "serving/engine", "max", 3 * GIB)
    _v2(machine, "serving", 4 * GIB, 4 * GIB + 5)
    assert available_bytes(machine) == 0


def test_in_a_container_only_the_top_of_the_tree_is_seen(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/../../hidden")
    _v2(machine, "", 2 * GIB, GIB)
    assert available_bytes(machine) == GIB


@pytest.mark.parametrize(("limit", "expected"), [(3 * GIB, 2 * GIB), (NO_LIMIT_V1, 8 * GIB)])
def test_the_first_version_of_control_groups_is_read_too(
    machine: Path, limit: int, expected: int
) -> None:
    _write(machine / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/x")
    top = machine / "sys/fs/cgroup/memory"
    _write(top / "memory.limit_in_bytes", limit)
    _write(top / "memory.usage_in_bytes", 2 * GIB)
    _write(top / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}")
    assert available_bytes(machine) == expected


def test_this_machine_has_memory() -> None:
    available = available_bytes()
    assert available is None or available > 2**20


def test_all_memory_is_what_a_group_may_use_where_that_is_less(machine: Path) -> None:
    _write(machine / "proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemAvailable: 1 kB\n")
    assert total_bytes(machine) == 16 * GIB
    _write(machine / "proc/self/cgroup", "0::/serving")
    _v2(machine, "serving", "max", 0)
    assert total_bytes(machine) == 16 * GIB
    _v2(machine, "serving", 4 * GIB, 0)
    assert total_bytes(machine) == 4 * GIB


def test_the_largest_cache_is_the_last_level(tmp_path: Path) -> None:
    assert last_level_cache_bytes(tmp_path) == 0
    caches = tmp_path / "sys/devices/system/cpu/cpu0/cache"
    for index, size in enumerate(("48K", "2048K", "260M", "odd")):
        _write(caches / f"index{index}/size", size)
    assert last_level_cache_bytes(tmp_path) == 260 * 2**20


def test_a_processor_has_the_name_that_its_maker_gave(tmp_path: Path) -> None:
    assert processor_name(tmp_path) != ""
    _write(tmp_path / "proc/cpuinfo", "processor : 0\nmodel name\t: A Fine CPU\n")
    assert processor_name(tmp_path) == "A Fine CPU"
