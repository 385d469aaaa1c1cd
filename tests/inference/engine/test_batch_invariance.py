"""A request has the same tokens, from the same bits, whatever shares its steps and however it is cut.

The models are small and random, one is the demonstration's; 64 requests each. What is compared are the logits themselves, by request and position.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from inference.engine.plan import StepPlan
from inference.engine.runner import Runner
from tests.inference.engine.bitwise import Answers, Prompts, check, load, run
from tests.inference.kernels.native_calls import library
from tests.inference.quantized_artifact import quantize_artifact

NUM_REQUESTS = 64
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16, "context_length": 1024}
KINDS = ("int4", "bfloat16", "float32", pytest.param("real", marks=pytest.mark.slow))


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, **shape: Any) -> Path: ...


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
    engine, answers = load(artifact, kind, prefix_cache=0), Answers()
    for name in prompts:
        run(engine, {name: prompts[name]}, answers)
    return answers


def test_in_one_batch(artifact: Path, kind: str, prompts: Prompts, alone: Answers) -> None:
    check(run(load(artifact, kind), prompts), alone)


def test_in_another_order_that_arrives_bit_by_bit(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers
) -> None:
    names = random.Random(1).sample(sorted(prompts), len(prompts))  # noqa: S311
    shuffled = {name: prompts[name] for name in names}
    check(run(load(artifact, kind), shuffled, num_arriving=3), alone)


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_in_chunks_of_another_length(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, chunk: int
) -> None:
    engine = load(artifact, kind, long_prefill_tokens=chunk, max_num_batched_tokens=64)
    check(run(engine, prompts), alone)


def test_after_preemptions(artifact: Path, kind: str, prompts: Prompts, alone: Answers) -> None:
    answers = run(load(artifact, kind, num_blocks=24), prompts)
    assert answers.num_preemptions > 0
    check(answers, alone)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_with_more_threads(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, num_threads: int
) -> None:
    check(run(load(artifact, kind, num_threads=num_threads), prompts), alone)


def test_a_model_that_looks_at_its_batch_is_noticed(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Runner.run

    def look_at_the_batch(self: Runner, plan: StepPlan) -> Tensor:
        return compute(self, plan) * (1 + 1e-6 * (plan.num_tokens > 64))

    monkeypatch.setattr(Runner, "run", look_at_the_batch)
    with pytest.raises(AssertionError, match="logits differ"):
        check(run(load(artifact, kind), prompts), alone)
