"""What is used again is what would have been computed, to the last bit: cached prompts, shared ones, swapped blocks.

Each answer is compared with that of an engine which has no cache and no swap space, and answers one request at a time.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from inference.engine.choices import choice_sampling, sequence_id
from inference.engine.kv_cache import KVCache
from inference.engine.llm_engine import LLMEngine
from inference.engine.plan import Move, MoveKind
from inference.engine.swap import PreemptionCosts
from tests.inference.engine.bitwise import Answers, Prompts, check, load, run, seeded
from tests.inference.kernels.native_calls import library
from tests.inference.quantized_artifact import quantize_artifact

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16, "context_length": 1024}
KINDS = (
    "int4",
    "bfloat16",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch", "real")),
)
NUM_REQUESTS = 24
NUM_CHOICES = 3
COMMON = 130


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
    """Half of them begin alike for 130 tokens; lengths around blocks and the split of 256 keys."""
    draw = random.Random(7)  # noqa: S311
    common = [draw.randrange(250) for _ in range(COMMON)]
    lengths = [1, 15, 16, 17, 33, 64, 125, 126, 127, 128, 129, 170]
    tails = [[draw.randrange(250) for _ in range(length)] for length in lengths]
    every = [common + tail for tail in tails] + tails
    return {f"r{number}": prompt for number, prompt in enumerate(every)}


@pytest.fixture(scope="module")
def alone(artifact: Path, kind: str, prompts: Prompts) -> Answers:
    engine, answers = load(artifact, kind, prefix_cache=0, swap_bytes=0), Answers()
    for name in prompts:
        run(engine, {name: prompts[name]}, answers)
    assert (answers.num_cached_tokens, answers.num_swaps) == (0, 0)
    return answers


@pytest.fixture
def copies_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreemptionCosts, "prefer_swap", lambda *_: True)


@pytest.mark.parametrize("chunk", [7, 512])
def test_prompts_that_begin_alike(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, chunk: int
) -> None:
    answers = run(load(artifact, kind, long_prefill_tokens=chunk), prompts)
    assert answers.num_cached_tokens > 5 * (COMMON // 16 * 16)
    check(answers, alone)


def test_prompts_that_were_answered_before_in_other_chunks(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers
) -> None:
    engine = load(artifact, kind, num_blocks=1000, long_prefill_tokens=11)
    check(run(engine, prompts), alone)
    again = run(engine, dict(reversed(list(prompts.items()))), num_arriving=2)
    assert again.num_cached_tokens > 0.8 * sum(len(prompt) for prompt in prompts.values())
    check(again, alone)


def test_a_cache_that_is_always_full(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers
) -> None:
    engine = _crowded(artifact, kind, swap_bytes=0)
    for _ in range(2):
        check(answers := run(engine, prompts), alone)
    assert answers.num_preemptions > 0
    assert answers.num_swaps == 0


@pytest.mark.usefixtures("copies_are_cheap")
@pytest.mark.parametrize("prefix_cache", [0, 1])
def test_preempted_by_swap(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, prefix_cache: int
) -> None:
    answers = run(_crowded(artifact, kind, prefix_cache=prefix_cache), prompts)
    assert answers.num_swaps > 0
    check(answers, alone)


def test_choices_are_what_single_requests_with_their_seeds_get(
    artifact: Path, kind: str, prompts: Prompts
) -> None:
    few = {name: prompts[name] for name in ("r0", "r3", "r12", "r14", "r15")}
    singles, engine = Answers(), load(artifact, kind, prefix_cache=0, swap_bytes=0)
    for name, prompt in few.items():
        for choice in range(NUM_CHOICES):
            sampling = choice_sampling(seeded(name), name, choice)
            run(engine, {sequence_id(name, choice): prompt}, singles, sampling=sampling)
    for options in ({}, {"prefix_cache": 0}, {"num_blocks": 16, "swap_bytes": 0}):
        together = run(load(artifact, kind, **options), few, n=NUM_CHOICES)
        assert (together.num_preemptions > 0) == ("num_blocks" in options)
        check(together, singles)
    assert len({str(tokens) for tokens in singles.tokens.values()}) == len(singles.tokens)


def test_a_cached_block_that_is_changed_is_noticed(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers
) -> None:
    engine = load(artifact, kind)
    run(engine, prompts)
    cache: KVCache = engine._runner._cache
    with torch.inference_mode():
        cache.tensor[0, 1:].view(-1)[::3] *= 1.01
    with pytest.raises(AssertionError, match="logits differ"):
        check(run(engine, prompts), alone)


@pytest.mark.usefixtures("copies_are_cheap")
def test_a_swap_that_loses_a_block_is_noticed(
    artifact: Path, kind: str, prompts: Prompts, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = KVCache.move

    def move_but_one(self: KVCache, moves: deque[Move]) -> int:
        for each in [each for each in moves if each.kind is MoveKind.SWAP_IN][:1]:
            moves.remove(each)
        return move(self, moves)

    monkeypatch.setattr(KVCache, "move", move_but_one)
    with pytest.raises(AssertionError, match="logits differ"):
        check(run(_crowded(artifact, kind, prefix_cache=0), prompts), alone)


def _crowded(artifact: Path, kind: str, **options: Any) -> LLMEngine:
    return load(artifact, kind, num_blocks=36, **options)
