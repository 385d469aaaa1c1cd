"""A version's own sampling: it fills what a request leaves out, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from inference.config import EngineConfig
from inference.engine import intake as intake_module
from inference.engine.llm_engine import LLMEngine
from inference.engine.request import fill_sampling
from inference.protocol import (
    DEFAULTABLE,
    GenerateRequest,
    InvalidParameter,
    SamplingParams,
)
from tests.inference.engine.loop_bench import Bench

DEFAULTS = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}
GIVEN = SamplingParams(max_tokens=2, seed=3, stop=("x",))


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, *, generation_defaults: Mapping[str, Any] | None = None) -> Path: ...


@pytest.fixture
def bench(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(intake_module, "PULL_BLOCK_MS", 50)
    monkeypatch.setattr(intake_module, "WATCH_BLOCK_MS", 50)
    bench = Bench(redis_url)
    bench.start()
    yield bench
    bench.stop()
    bench.queue.close()
    bench.redis.close()


def _request(
    *unset: str, request_id: str = "r1", sampling: SamplingParams = GIVEN
) -> GenerateRequest:
    return GenerateRequest(request_id, "chat", sampling, 30.0, prompt="Hello", unset=unset)


def _load(artifact: Path) -> LLMEngine:
    return LLMEngine.load(EngineConfig(artifact, dtype="float32", num_threads=1))


def test_defaults_fill_what_the_request_leaves_out() -> None:
    assert fill_sampling(_request(*DEFAULTABLE), DEFAULTS) == replace(
        GIVEN, temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1
    )


def test_a_value_that_the_caller_gave_wins() -> None:
    sampling = replace(GIVEN, temperature=1.0)  # the same as if nobody had said anything

    filled = fill_sampling(_request("top_p", sampling=sampling), DEFAULTS)

    assert filled == replace(sampling, top_p=0.9)


def test_a_version_without_defaults_changes_nothing() -> None:
    assert fill_sampling(_request(*DEFAULTABLE), {}) == GIVEN


@pytest.mark.parametrize("name", ["do_sample", "max_tokens", "seed"])
def test_a_default_of_another_name_is_ignored(name: str) -> None:
    assert fill_sampling(_request(name, *DEFAULTABLE), {name: 1}) == GIVEN


@pytest.mark.parametrize(("value", "error"), [(9.0, InvalidParameter), ("warm", TypeError)])
def test_a_default_that_cannot_be_used_is_an_error(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        fill_sampling(_request("temperature"), {"temperature": value})


def test_a_slot_applies_the_defaults_of_its_version(bench: Bench) -> None:
    bench.engine.generation_defaults = DEFAULTS

    bench.send_request(_request("temperature", "top_k"))

    assert bench.wait_for_last("r1")[-1].finish is not None
    assert bench.engine.samplings["r1"] == replace(GIVEN, temperature=0.6, top_k=20)


def test_a_default_that_cannot_be_used_fails_those_who_need_it_alone(bench: Bench) -> None:
    bench.engine.generation_defaults = {"temperature": 9.0}

    bench.send_request(_request("temperature", request_id="needs-it"))
    bench.send_request(_request(request_id="does-not"))
    failure = bench.wait_for_last("needs-it")[-1].failure

    assert failure is not None
    assert failure.status == 500
    assert bench.wait_for_last("does-not")[-1].finish is not None


def test_an_engine_tells_the_defaults_of_its_artifact(
    tiny_artifact: Path, write_tiny_artifact: WriteTinyArtifact
) -> None:
    artifact = write_tiny_artifact(generation_defaults=DEFAULTS)

    assert _load(artifact).generation_defaults == DEFAULTS
    assert _load(tiny_artifact).generation_defaults == {}


def test_different_defaults_are_different_fingerprints(
    tiny_artifact: Path, write_tiny_artifact: WriteTinyArtifact
) -> None:
    artifacts = [
        tiny_artifact,
        write_tiny_artifact(generation_defaults={"temperature": 0.6}),
        write_tiny_artifact(generation_defaults={"temperature": 0.7}),
    ]

    assert len({_load(artifact).fingerprint for artifact in artifacts}) == 3


def test_generate_uses_exactly_the_sampling_it_is_given(
    tiny_artifact: Path, write_tiny_artifact: WriteTinyArtifact
) -> None:
    sampling = SamplingParams(max_tokens=12, seed=11, ignore_eos=True)
    biased = _load(write_tiny_artifact(generation_defaults={"temperature": 0.0}))

    assert biased.generate(["abc"], sampling) == _load(tiny_artifact).generate(["abc"], sampling)
