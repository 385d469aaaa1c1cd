"""A request has the same tokens, from the same bits, whatever shares its steps and however it is cut.

The models are small and random, one is the demonstration's; 64 requests each. What is compared are the logits themselves, by request and position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.engine.runner import Runner
from inference.engine.scheduler import StepPlan
from inference.protocol import SamplingParams
from tests.inference.kernels.native_calls import library
from tests.inference.quantized_artifact import quantize_artifact

NUM_REQUESTS = 64
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16, "context_length": 1024}
SEEDED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
KINDS = ("int4", "bfloat16", "float32", pytest.param("real", marks=pytest.mark.slow))

Prompts = Mapping[str, list[int]]
RunPlan = Callable[[StepPlan], Tensor]


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, **shape: Any) -> Path: ...


@dataclass(slots=True)
class Answers:
    """What each request was told: its tokens, and the bytes of the logits behind each of them."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], bytes] = field(default_factory=dict)
    num_preemptions: int = 0


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    library()
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def artifact(
    request: pytest.FixtureRequest,
    write_tiny_artifact: WriteTinyArtifact,
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
) -> Path:
    if kind == "real":
        return Path(request.getfixturevalue("real_artifact"))
    path = write_tiny_artifact(**SHAPE)
    root = tmp_path_factory.mktemp("quantised")
    return quantize_artifact(path, root, group=32) if kind == "int4" else path


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Lengths around blocks, chunks and the split of 256 keys."""
    draw = random.Random(3)  # noqa: S311
    lengths = [1, 2, 15, 16, 17, 255, 256, 257, 300]
    lengths += [draw.randrange(1, 60) for _ in range(NUM_REQUESTS - len(lengths))]
    return {
        f"r{number}": [draw.randrange(250) for _ in range(length)]
        for number, length in enumerate(lengths)
    }


@pytest.fixture(scope="module")
def alone(artifact: Path, kind: str, prompts: Prompts) -> Answers:
    """Each request with the engine to itself."""
    engine, answers = _load(artifact, kind), Answers()
    for name in prompts:
        _run(engine, {name: prompts[name]}, answers)
    return answers


def test_in_one_batch(artifact: Path, kind: str, prompts: Prompts, alone: Answers) -> None:
    _check(_run(_load(artifact, kind), prompts), alone)


def test_in_another_order_that_arrives_bit_by_bit(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers
) -> None:
    names = random.Random(1).sample(sorted(prompts), len(prompts))  # noqa: S311
    shuffled = {name: prompts[name] for name in names}
    _check(_run(_load(artifact, kind), shuffled, num_arriving=3), alone)


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_in_chunks_of_another_length(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, chunk: int
) -> None:
    engine = _load(artifact, kind, long_prefill_tokens=chunk, max_num_batched_tokens=64)
    _check(_run(engine, prompts), alone)


def test_after_preemptions(artifact: Path, kind: str, prompts: Prompts, alone: Answers) -> None:
    answers = _run(_load(artifact, kind, num_blocks=24), prompts)
    assert answers.num_preemptions > 0
    _check(answers, alone)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_with_more_threads(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, num_threads: int
) -> None:
    _check(_run(_load(artifact, kind, num_threads=num_threads), prompts), alone)


def test_a_model_that_looks_at_its_batch_is_noticed(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runner.run

    def look_at_the_batch(self: Runner, plan: StepPlan) -> Tensor:
        return run(self, plan) * (1 + 1e-6 * (plan.num_tokens > 64))

    monkeypatch.setattr(Runner, "run", look_at_the_batch)
    with pytest.raises(AssertionError, match="logits differ"):
        _check(_run(_load(artifact, kind), prompts), alone)


def _load(artifact: Path, kind: str, **options: Any) -> LLMEngine:
    values: dict[str, Any] = {
        "dtype": "float32" if kind == "float32" else "bfloat16",
        "kernel": "native",
        "num_threads": 1,
        "num_blocks": 400,
        "long_prefill_tokens": 512,
    }
    return LLMEngine.load(EngineConfig(artifact, **{**values, **options}))


def _run(
    engine: LLMEngine,
    prompts: Prompts,
    answers: Answers | None = None,
    *,
    num_arriving: int = NUM_REQUESTS,
) -> Answers:
    """Add what ``prompts`` get to ``answers``; so many arrive before each step."""
    answers = answers or Answers()
    inner = engine._runner
    engine._runner = _Recorder(inner, answers)  # type: ignore[assignment]
    waiting = list(prompts.items())
    while waiting or engine.has_unfinished:
        for name, prompt in waiting[:num_arriving]:
            engine.add_request(name, prompt, replace(SEEDED, seed=int(name[1:])))
        del waiting[:num_arriving]
        for output in engine.step():
            answers.tokens.setdefault(output.request_id, []).append(output.token_id)
    engine._runner = inner
    answers.num_preemptions = engine.num_preemptions
    return answers


@dataclass(frozen=True, slots=True)
class _Recorder:
    """A runner that keeps what it answers."""

    inner: Runner
    answers: Answers

    def resize(self, num_blocks: int, kept: Sequence[int]) -> None:
        """As the runner does."""
        self.inner.resize(num_blocks, kept)

    def run(self, plan: StepPlan) -> Tensor:
        """As the runner does, and remember."""
        logits = self.inner.run(plan)
        requests = [row.request for row in plan.rows if row.samples]
        for request, row in zip(requests, logits, strict=True):
            self.answers.logits[request.id, len(request.tokens)] = row.numpy().tobytes()
        return logits


def _check(answers: Answers, alone: Answers) -> None:
    different = _differences(answers.logits, alone.logits)
    assert not different, f"{len(different)} logits differ, first {different[0]}"
    assert answers.tokens == alone.tokens


def _differences(
    left: Mapping[tuple[str, int], bytes], right: Mapping[tuple[str, int], bytes]
) -> Sequence[tuple[str, int]]:
    assert left.keys() == right.keys()
    return [key for key in sorted(left) if left[key] != right[key]]
