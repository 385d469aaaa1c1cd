"""What is kept between steps, with graphs that replay on the CPU: as a real one, each keeps its cache and its buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.models.cuda.graphs import DecodeGraphs
from tests.inference.models.cuda.small_decoder import (
    Sequences,
    cuda_decoder,
    plain_decoder,
    run_script,
    tokens,
)


class _Replay:
    """Stands for a captured graph: the same calls on the same memory, its answer where the first one was."""

    def __init__(self, compute: Callable[[], Tensor], logits: Tensor) -> None:
        self._compute = compute
        self._logits = logits

    @torch.inference_mode()
    def replay(self) -> None:
        self._logits.copy_(self._compute())


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the buffers of all graphs, in the order in which they were captured."""
    shapes: list[tuple[int, int]] = []

    def capture(self: DecodeGraphs, bucket: Any, cache: Tensor) -> None:
        shapes.append(tuple(bucket.packed.shape))
        bucket.logits = self._compute(bucket.packed, bucket.attention, cache)
        bucket.graph = _Replay(
            lambda: self._compute(bucket.packed, bucket.attention, cache), bucket.logits
        )

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    return shapes


@pytest.fixture
def sequences(tiny_artifact: Path, captured: list[tuple[int, int]]) -> Sequences:
    torch.set_num_threads(1)
    decoder = cuda_decoder(tiny_artifact)
    decoder.graphs._captures = True
    return Sequences(decoder)


def test_each_shape_is_captured_once_and_replayed_with_new_numbers(
    tiny_artifact: Path, sequences: Sequences, captured: list[tuple[int, int]]
) -> None:
    logits = run_script(sequences)
    expected = run_script(Sequences(plain_decoder(tiny_artifact)))
    for step, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(step, wanted, atol=1e-4, rtol=0)
    assert len(captured) == len(set(captured)) >= 3


def test_the_answer_of_a_step_survives_the_next_one(sequences: Sequences) -> None:
    sequences.extend({0: tokens(9)})
    first = sequences.extend({0: [5]})
    kept = first.clone()
    sequences.extend({0: [6]})
    assert torch.equal(first, kept)


def test_a_cache_that_moved_is_read_where_it_is(
    sequences: Sequences, captured: list[tuple[int, int]]
) -> None:
    still = Sequences(sequences.model)
    for each in (sequences, still):
        each.extend({0: tokens(30)})
        each.extend({0: [5]})
    old = sequences.cache
    sequences.cache = torch.cat([old, torch.full_like(old, torch.nan)], 1)
    old.fill_(torch.nan)
    num_captured = len(captured)
    moved = sequences.extend({0: [6]})
    assert len(captured) == num_captured + 1
    assert torch.equal(moved, still.extend({0: [6]}))


def test_a_bucket_that_finds_no_memory_stays_eager(
    sequences: Sequences, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def refuse(*_: Any) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.undo()  # the real capture
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(DecodeGraphs, "_compute_aside", refuse)
    sequences.extend({0: tokens(9)})
    with caplog.at_level("ERROR"):
        answers = [sequences.extend({0: [token]}) for token in (5, 6)]
    assert all(answer.isfinite().all() for answer in answers)
    assert len(tries) == 1
    assert "the bucket stays eager rows=1 blocks=8" in caplog.text
