"""The engine on the CUDA step, here on the CPU: reuse, swap, choices and a cache that moves, against plain torch.

The step promises no equal bits across batches, so logits are compared within what float32 loses in another order.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from inference.artifact import Manifest, verify
from inference.config import EngineConfig, InvalidConfig
from inference.engine import kv_memory, parts
from inference.engine.kv_cache import KVCache
from inference.engine.plan import Move, MoveKind
from inference.engine.swap import PreemptionCosts
from inference.planner.memory import MARGIN_BYTES
from tests.inference.engine.bitwise import Answers, Prompts, load, run
from tests.inference.quantized_artifact import quantize_artifact

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16, "context_length": 1024}
TOLERANCE = 2e-4
COMMON = 70


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, **shape: Any) -> Path: ...


@pytest.fixture(scope="module")
def artifact(write_tiny_artifact: WriteTinyArtifact) -> Path:
    torch.set_num_threads(1)
    return write_tiny_artifact(**SHAPE)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    draw = random.Random(3)  # noqa: S311
    common = [draw.randrange(250) for _ in range(COMMON)]
    tails = [[draw.randrange(250) for _ in range(length)] for length in (1, 16, 33, 60, 61, 90)]
    every = [common + tail for tail in tails] + tails
    return {f"r{number}": prompt for number, prompt in enumerate(every)}


@pytest.fixture(scope="module")
def expected(artifact: Path, prompts: Prompts) -> Answers:
    """Each request alone, by plain torch."""
    engine, answers = load(artifact, "torch", prefix_cache=0, swap_bytes=0), Answers()
    for name in prompts:
        run(engine, {name: prompts[name]}, answers)
    return answers


@pytest.fixture
def _cuda_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "uses_cuda_step", lambda _: True)


def _check(answers: Answers, expected: Answers) -> None:
    assert answers.tokens == expected.tokens
    assert answers.logits.keys() == expected.logits.keys()
    for key, raw in answers.logits.items():
        found = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        wanted = torch.frombuffer(bytearray(expected.logits[key]), dtype=torch.float32)
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("_cuda_step")
@pytest.mark.parametrize("options", [{}, {"long_prefill_tokens": 13}, {"max_num_seqs": 5}])
def test_cached_prompts_in_any_batch_and_chunk(
    artifact: Path, prompts: Prompts, expected: Answers, options: dict[str, int]
) -> None:
    engine = load(artifact, "torch", **options)
    assert engine.kernel == "cuda sdpa, float32"
    answers = run(engine, prompts, num_arriving=4)
    assert answers.num_cached_tokens > 0
    _check(answers, expected)


@pytest.mark.usefixtures("_cuda_step")
@pytest.mark.parametrize("swap_bytes", [0, 2**28])
def test_preemption_by_swap_and_by_recompute(
    artifact: Path,
    prompts: Prompts,
    expected: Answers,
    monkeypatch: pytest.MonkeyPatch,
    swap_bytes: int,
) -> None:
    monkeypatch.setattr(PreemptionCosts, "prefer_swap", lambda *_: True)
    engine = load(artifact, "torch", num_blocks=30, swap_bytes=swap_bytes)
    answers = run(engine, prompts)
    assert answers.num_preemptions > 0
    assert (answers.num_swaps > 0) == (swap_bytes > 0)
    _check(answers, expected)


@pytest.mark.usefixtures("_cuda_step")
def test_choices_share_their_prompt_and_copy_before_they_write(
    artifact: Path, prompts: Prompts
) -> None:
    few = {name: prompts[name] for name in ("r0", "r2", "r9")}
    shared = run(load(artifact, "torch"), few, n=3)
    alone = run(load(artifact, "torch", prefix_cache=0), few, n=3, num_arriving=1)
    assert len(shared.tokens) == 9
    assert shared.tokens == alone.tokens


@pytest.mark.usefixtures("_cuda_step")
def test_a_swap_that_loses_a_block_is_noticed(
    artifact: Path, prompts: Prompts, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = KVCache.move

    def move_but_one(self: KVCache, moves: deque[Move]) -> int:
        for each in [each for each in moves if each.kind is MoveKind.SWAP_IN][:1]:
            moves.remove(each)
        return move(self, moves)

    monkeypatch.setattr(PreemptionCosts, "prefer_swap", lambda *_: True)
    monkeypatch.setattr(KVCache, "move", move_but_one)
    with pytest.raises(AssertionError):
        _check(run(load(artifact, "torch", num_blocks=30, prefix_cache=0), prompts), expected)


def test_on_a_device_the_cache_is_bounded_by_its_memory_and_swap_space_by_that_of_the_host(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(artifact, "torch", num_blocks=200, standby_kv_bytes=1)
    block_bytes = engine._runner.bytes_per_block
    engine._memory._is_on_cpu = False
    free = {"device": 100, "host": 3}
    monkeypatch.setattr(
        kv_memory, "free_bytes", lambda _: MARGIN_BYTES + free["device"] * block_bytes
    )
    monkeypatch.setattr(
        kv_memory, "available_bytes", lambda: MARGIN_BYTES + free["host"] * block_bytes
    )
    before = engine._runner.num_blocks
    assert not engine._memory.grow()
    assert engine._runner.num_blocks == before + 100
    free["device"] = 1000
    assert engine._memory.grow()
    assert engine._runner.num_blocks == 200
    assert engine._memory._swap.num_slots == 3


def test_the_cuda_step_is_for_a_cuda_device_unless_plain_torch_is_asked_for() -> None:
    def chosen(**options: str) -> bool:
        return parts.uses_cuda_step(EngineConfig(Path("none"), **options))  # type: ignore[arg-type]

    assert chosen(device="cuda")
    assert not chosen(device="cuda", kernel="torch")
    assert not chosen(device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name(artifact: Path) -> None:
    with pytest.raises(InvalidConfig, match="device='cuda' needs a CUDA device"):
        parts.load_parts(EngineConfig(artifact, device="cuda"))


@pytest.mark.usefixtures("_cuda_step")
def test_int4_weights_count_as_stored_with_tables_in_floats(artifact: Path, tmp_path: Path) -> None:
    quantised = quantize_artifact(artifact, tmp_path, group=32)
    manifest: Manifest = verify(quantised)

    def weight_bytes(dtype: str) -> int:
        config = EngineConfig(quantised, dtype=dtype, kernel="torch")
        return parts.Sizes.of(config, manifest, None).weight_bytes

    rotary = 1024 * 8 * 8
    tables = 320 * 96 * 2
    assert weight_bytes("bfloat16") == manifest.size_bytes + tables + rotary
    assert weight_bytes("float16") > weight_bytes("bfloat16")  # widened: the kernel has no float16
