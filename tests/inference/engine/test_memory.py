"""What a version needs, reckoned before it is loaded, against what a machine says it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.config import EngineConfig
from inference.engine import parts
from inference.engine.llm_engine import LLMEngine
from inference.engine.memory import (
    NotEnoughMemory,
    check_fits,
    offer_to_oom_killer,
    oom_score,
)
from inference.planner.memory import Footprint


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root directory without a score yet."""
    return tmp_path


def _write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_mend() -> None:
    needed = Footprint(weights=600 * 2**20, kv_cache=64 * 2**20, working=336 * 2**20)
    check_fits(needed, needed.total)
    check_fits(needed, None)
    with pytest.raises(NotEnoughMemory) as refusal:
        check_fits(needed, needed.total - 2**20)
    for part in ("1,000 MiB", "weights 600 MiB", "KV cache 64 MiB", "999 MiB are available"):
        assert part in str(refusal.value)
    assert "max_model_len" in str(refusal.value)


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
