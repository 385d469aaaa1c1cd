"""What is asked of the machine and its packages when an engine is put together."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import parts
from inference.engine.llm_engine import LLMEngine
from inference.kernels.loader import KernelUnavailable, load_library


def _load(artifact: Path, num_threads: int = 1) -> parts.Parts:
    return parts.load_parts(
        EngineConfig(artifact=artifact, dtype="float32", num_threads=num_threads)
    )


@pytest.mark.parametrize(("num_cpus", "num_threads"), [(3, 2), (1, 1), (None, 1)])
def test_threads_are_left_for_others_where_no_affinity_is_told(
    tiny_artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_cpus: int | None,
    num_threads: int,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: num_cpus)

    _load(tiny_artifact, num_threads=0)

    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_another_release_of_what_makes_the_prompt_has_another_fingerprint(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    fingerprint = _load(tiny_artifact).fingerprint
    assert _load(tiny_artifact).fingerprint == fingerprint

    def tell(name: str) -> str:
        return "0.0.1" if name == package else version(name)

    monkeypatch.setattr(parts, "version", tell)

    assert _load(tiny_artifact).fingerprint != fingerprint


def test_the_kernel_is_told_with_its_numbers_and_with_threads_that_may_change_a_sum(
    tiny_artifact: Path,
) -> None:
    plain = EngineConfig(tiny_artifact, kernel="torch", dtype="float32", num_threads=1)
    assert LLMEngine.load(plain).kernel == "torch, float32, threads 1"


def test_the_native_kernel_is_told_with_its_instruction_set(tiny_artifact: Path) -> None:
    try:
        library = load_library()
    except KernelUnavailable as reason:
        pytest.skip(str(reason))
    config = EngineConfig(tiny_artifact, kernel="native", num_threads=2)
    assert LLMEngine.load(config).kernel == f"{library.name}, bfloat16"


def test_a_version_with_its_own_libraries_has_another_fingerprint(tiny_artifact: Path) -> None:
    plain, own, other = (
        parts.load_parts(EngineConfig(tiny_artifact, dtype="float32", runtime=digest)).fingerprint
        for digest in ("", "0123456789abcdef", "fedcba9876543210")
    )

    assert len({plain, own, other}) == 3
