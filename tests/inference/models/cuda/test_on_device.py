"""What only a CUDA device can show: graphs, FlashInfer, int4 by its kernel, transfers to pinned memory."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from inference.config import EngineConfig
from inference.engine.kv_cache import KVCache
from inference.engine.llm_engine import LLMEngine
from inference.engine.plan import Move, MoveKind
from inference.engine.swap import PreemptionCosts
from inference.models.attention import Span
from inference.models.step import Step
from inference.protocol import SamplingParams
from tests.inference.models.cuda.small_decoder import (
    SHAPE,
    Sequences,
    cuda_decoder,
    plain_decoder,
    run_script,
    tokens,
)
from tests.inference.quantized_artifact import quantize_artifact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, **shape: Any) -> Path: ...


def _run(artifact: Path, dtype: torch.dtype, *, captures: bool) -> list[Tensor]:
    decoder = cuda_decoder(artifact, dtype=dtype, device=CUDA, captures=captures)
    logits = run_script(Sequences(decoder, dtype, CUDA))
    assert (decoder.graphs.num_captured > 0) == captures
    return logits


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-3), (torch.bfloat16, 0.03), (torch.float16, 0.01)],
)
@pytest.mark.parametrize("captures", [False, True])
def test_logits_are_those_of_float32_on_the_cpu(
    write_tiny_artifact: WriteTinyArtifact, dtype: torch.dtype, tolerance: float, captures: bool
) -> None:
    artifact = write_tiny_artifact(**SHAPE)
    logits = torch.cat(_run(artifact, dtype, captures=captures))
    expected = torch.cat(run_script(Sequences(plain_decoder(artifact, dtype))))
    assert (logits - expected).std() < tolerance * expected.std()


@pytest.mark.parametrize("group", [32, 64])
def test_int4_gives_what_its_numbers_give(
    write_tiny_artifact: WriteTinyArtifact, tmp_path: Path, group: int
) -> None:
    artifact = quantize_artifact(write_tiny_artifact(**SHAPE), tmp_path, group=group)
    logits = torch.cat(_run(artifact, torch.bfloat16, captures=True))
    expected = torch.cat(run_script(Sequences(plain_decoder(artifact))))
    assert (logits - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_gives_the_bits_of_the_same_calls(
    write_tiny_artifact: WriteTinyArtifact, dtype: torch.dtype
) -> None:
    artifact = write_tiny_artifact(**SHAPE)
    captured = _run(artifact, dtype, captures=True)
    for step, eager in zip(captured, _run(artifact, dtype, captures=False), strict=True):
        assert torch.equal(step, eager)
    for step, again in zip(captured, _run(artifact, dtype, captures=True), strict=True):
        assert torch.equal(step, again)


def test_the_answer_of_a_replay_survives_the_next_one(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    decoder = cuda_decoder(write_tiny_artifact(**SHAPE), device=CUDA, captures=True)
    cache = torch.zeros((2, 4, *decoder.block_shape(16)), device=CUDA)
    first = decoder.compute(Step([5], [Span(0, 1, [1])], [0]), cache)
    kept = first.clone()
    second = decoder.compute(Step([6], [Span(1, 1, [1])], [0]), cache)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_graphs_are_captured_again_when_the_cache_moves(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    decoder = cuda_decoder(write_tiny_artifact(**SHAPE), device=CUDA, captures=True)
    moving, still = (Sequences(decoder, device=CUDA) for _ in range(2))
    for each in (moving, still):
        each.extend({0: tokens(30)})
        each.extend({0: [5]})
    moving.cache = torch.cat([moving.cache, torch.full_like(moving.cache, torch.nan)], 1)
    assert torch.equal(moving.extend({0: [6]}), still.extend({0: [6]}))


def test_blocks_come_back_from_pinned_memory() -> None:
    cache = KVCache(
        num_layers=3, num_blocks=6, block_shape=(2, 8), dtype=torch.bfloat16, device=CUDA
    )
    numbers = torch.arange(3 * 6 * 16, dtype=torch.bfloat16).view(3, 6, 2, 8)
    cache.tensor.copy_(numbers)
    cache.resize_swap(4)
    out = [Move(MoveKind.SWAP_OUT, block, 4 - block) for block in (1, 2, 3)]
    cache.move(deque(out))
    cache.tensor[:, 1:].zero_()
    cache.move(deque([Move(MoveKind.SWAP_IN, move.target, move.source + 2) for move in out]))
    assert torch.equal(cache.tensor[:, 3:].cpu(), numbers[:, 1:4])
    swapped = cache._swapped
    assert swapped is not None
    assert swapped.is_pinned()
    assert swapped[:, 0].is_contiguous()


def test_an_engine_answers_the_same_with_reuse_and_swap(
    write_tiny_artifact: WriteTinyArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreemptionCosts, "prefer_swap", lambda *_: True)
    artifact = write_tiny_artifact(**SHAPE)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [tokens(40 + 9 * number, 7) for number in range(8)]
    answers = {}
    for num_blocks, device in ((400, "cpu"), (400, "cuda"), (30, "cuda")):
        engine = LLMEngine.load(
            EngineConfig(
                artifact,
                dtype="float32",
                device=device,
                kernel="torch" if device == "cpu" else "auto",
                num_blocks=num_blocks,
                num_threads=1,
            )
        )
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, sampling)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished:
            for output in engine.step():
                found.setdefault(output.request_id, []).append(output.token_id)
        engine.check_integrity()
        answers[num_blocks, device] = found
        if num_blocks == 30:
            assert engine.usage().num_swaps > 0
    assert answers[400, "cuda"] == answers[400, "cpu"]
    assert answers[30, "cuda"] == answers[400, "cpu"]
