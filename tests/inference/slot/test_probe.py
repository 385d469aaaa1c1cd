"""The probe of a version that was just loaded: the same digest for the same numbers, a refusal for broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.slot.probe import NUM_TOKENS, PROMPTS, ProbeFailed, probe
from tests.inference.instant_engine import WORDS, InstantEngine


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, *, poisoned_token: int | None = None, **shape: Any) -> Path: ...


def _load(artifact: Path, **options: Any) -> LLMEngine:
    values: dict[str, Any] = {"dtype": "float32", "num_threads": 1, **options}
    return LLMEngine.load(EngineConfig(artifact, **values))


def test_equal_fingerprints_give_equal_digests(
    tiny_artifact: Path, write_tiny_artifact: WriteTinyArtifact
) -> None:
    first, second = _load(tiny_artifact), _load(tiny_artifact, max_num_seqs=2)
    assert first.fingerprint == second.fingerprint
    assert probe(first) == probe(second)

    other = _load(write_tiny_artifact(rope_theta=100.0, num_layers=3))
    assert probe(other) != probe(first)


def test_a_probe_leaves_an_idle_engine(tiny_artifact: Path) -> None:
    engine = _load(tiny_artifact)
    probe(engine)
    assert not engine.has_unfinished
    assert not engine.usage().kv_blocks_used
    engine.check_integrity()
    probe(engine)


def test_weights_that_are_not_numbers_fail_the_probe(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    engine = _load(write_tiny_artifact(poisoned_token=5))
    with pytest.raises(ProbeFailed, match="NaN or infinite weights"):
        probe(engine)


def test_a_prompt_that_a_short_context_refuses_is_left_out(tiny_artifact: Path) -> None:
    short = _load(tiny_artifact, max_model_len=40)
    assert probe(short) != probe(_load(tiny_artifact))


def test_a_version_that_refuses_every_prompt_is_not_ready(tiny_artifact: Path) -> None:
    engine = _load(tiny_artifact, max_model_len=NUM_TOKENS)
    with pytest.raises(ProbeFailed, match="refuses even the simplest prompts: messages has"):
        probe(engine)


def test_no_prompt_has_a_word_that_the_instant_engine_takes_for_a_fault() -> None:
    texts = [each if isinstance(each, str) else each.content for each in PROMPTS]
    assert not [word for word in (*WORDS, "refuse") for text in texts if word in text]
    assert probe(InstantEngine()) == probe(InstantEngine())
