"""What a version needs, reckoned before it is loaded, against what a machine says it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors import safe_open

from inference.artifact import WEIGHTS, read_manifest
from inference.config import EngineConfig
from inference.engine import parts
from inference.engine.llm_engine import LLMEngine
from inference.engine.memory import (
    Footprint,
    NotEnoughMemory,
    available_bytes,
    check_fits,
    count_weight_bytes,
    footprint,
    offer_to_oom_killer,
    oom_score,
)

GIB = 2**30
NO_LIMIT_V1 = 2**63 - 4096


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, **shape: Any) -> Path: ...


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


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_reckoned_as_they_are_stored(
    write_tiny_artifact: WriteTinyArtifact, is_tied: bool
) -> None:
    artifact = write_tiny_artifact(tie_word_embeddings=is_tied)
    model = read_manifest(artifact).model
    with safe_open(artifact / WEIGHTS, framework="pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (no mapping)
    assert count_weight_bytes(model, item_size=4, num_positions=0) == stored
    rotary = count_weight_bytes(model, item_size=4, num_positions=100) - stored
    assert rotary == 100 * 6 * torch.complex64.itemsize


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_mend() -> None:
    needed = Footprint(weights=600 * 2**20, kv_cache=64 * 2**20, working=336 * 2**20)
    check_fits(needed, needed.total)
    check_fits(needed, None)
    with pytest.raises(NotEnoughMemory) as refusal:
        check_fits(needed, needed.total - 2**20)
    for part in ("1,000 MiB", "weights 600 MiB", "KV cache 64 MiB", "999 MiB are available"):
        assert part in str(refusal.value)
    assert "max_model_len" in str(refusal.value)


def test_the_working_space_covers_the_largest_weight_while_it_is_shaped(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    model = read_manifest(write_tiny_artifact()).model
    small = footprint(model, weight_bytes=1, kv_bytes=2)
    assert (small.weights, small.kv_cache) == (1, 2)
    assert small.total == 3 + small.working


def test_an_engine_that_does_not_fit_reads_no_weights(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "available_bytes", lambda: 100 * 2**20)
    monkeypatch.setattr(parts, "_load_model", None)
    with pytest.raises(NotEnoughMemory, match="100 MiB are available"):
        LLMEngine.load(EngineConfig(tiny_artifact, num_threads=1))


def test_the_kernel_is_told_who_goes_first(machine: Path) -> None:
    _write(machine / "proc/self/oom_score_adj", 100)
    assert oom_score(machine) == 100
    offer_to_oom_killer(600, base=100, root=machine)
    assert oom_score(machine) == 700
    offer_to_oom_killer(950, base=100, root=machine)
    assert oom_score(machine) == 1000
    offer_to_oom_killer(0, base=100, root=machine)
    assert oom_score(machine) == 100


def test_a_kernel_that_takes_no_score_is_no_error(tmp_path: Path) -> None:
    offer_to_oom_killer(600, base=0, root=tmp_path)
    assert oom_score(tmp_path) == 0
