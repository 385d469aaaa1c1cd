"""Bytes and blocks: against the tensors that are allocated, and against the admission that lets sequences in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from inference.artifact import WEIGHTS, read_manifest
from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.planner.memory import (
    NUM_NULL_BLOCKS,
    blocks_for,
    blocks_in,
    can_admit,
    count_sequences,
    decoder_bytes,
    kv_bytes_per_token,
    load_footprint,
    standby_blocks,
)
from inference.planner.shape import ModelShape
from inference.protocol import SamplingParams


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, **shape: Any) -> Path: ...


@given(
    num_blocks=st.integers(1, 3000), num_tokens=st.integers(1, 5000), block_size=st.integers(1, 64)
)
def test_as_many_sequences_are_counted_as_admission_lets_in(
    num_blocks: int, num_tokens: int, block_size: int
) -> None:
    each = blocks_for(num_tokens, block_size)
    free, running = num_blocks - NUM_NULL_BLOCKS, 0
    while can_admit(each, num_free=free, num_running=running):
        free, running = free - each, running + 1
    assert free >= 0
    counted = count_sequences(num_blocks, num_tokens=num_tokens, block_size=block_size)
    assert counted == running


def test_a_token_more_than_a_block_takes_another_block() -> None:
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_there_are_no_blocks_in_less_than_nothing() -> None:
    assert [blocks_in(size, 100) for size in (-1, 0, 99, 100, 250)] == [0, 0, 0, 1, 2]


def test_a_standby_keeps_one_sequence_where_its_bytes_hold_less() -> None:
    sizes = {"block_bytes": 1000, "block_size": 16}
    assert standby_blocks(full=500, standby_bytes=1000, **sizes) == 1 + 512 // 16
    assert standby_blocks(full=500, standby_bytes=100_000, **sizes) == 100
    assert standby_blocks(full=20, standby_bytes=100_000, **sizes) == 20


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_reckoned_as_they_are_stored(
    write_tiny_artifact: WriteTinyArtifact, is_tied: bool
) -> None:
    artifact = write_tiny_artifact(tie_word_embeddings=is_tied)
    model = read_manifest(artifact).model
    with safe_open(artifact / WEIGHTS, framework="pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (no mapping)
    assert decoder_bytes(model, item_size=4, num_positions=0) == stored
    rotary = decoder_bytes(model, item_size=4, num_positions=100) - stored
    assert rotary == 100 * 6 * torch.complex64.itemsize


def test_the_working_space_covers_the_largest_weight_while_it_is_shaped(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    model = read_manifest(write_tiny_artifact()).model
    small = load_footprint(model, weight_bytes=1, kv_bytes=2)
    assert (small.weights, small.kv_cache) == (1, 2)
    assert small.total == 3 + small.working


def test_the_embedding_that_is_no_head_is_only_looked_up(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    for is_tied in (True, False):
        manifest = read_manifest(write_tiny_artifact(tie_word_embeddings=is_tied))
        shape = ModelShape.of_config(manifest.model, params=manifest.num_parameters)
        table = manifest.model.vocab_size * manifest.model.hidden_size
        assert shape.lookup_params == (0 if is_tied else table)


# --------------------------------------------------------------------------------------------------- the real model


KV_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def small_engine(real_artifact: Path) -> LLMEngine:
    """The real model with a KV cache for few sequences, so that it is soon full."""
    config = EngineConfig(
        real_artifact, kv_cache_bytes=KV_BYTES, num_threads=1, max_num_batched_tokens=2048,
        long_prefill_tokens=512, max_num_seqs=64,
    )  # fmt: skip
    return LLMEngine.load(config)


@pytest.mark.slow
def test_the_real_model_runs_as_many_sequences_as_are_planned_and_the_next_one_queues(
    small_engine: LLMEngine, real_artifact: Path
) -> None:
    """Planned from the shape, against the tensor that was allocated; the one too many is answered whole, later."""
    manifest = read_manifest(real_artifact)
    shape = ModelShape.of_config(manifest.model, params=manifest.num_parameters)
    block_bytes = 16 * kv_bytes_per_token(shape, "bf16")
    num_blocks = blocks_in(KV_BYTES, block_bytes)
    planned = count_sequences(num_blocks, num_tokens=512, block_size=16)
    assert planned == 5

    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    tokens: dict[str, int] = {}
    for index in range(planned + 2):
        # Prompts that have nothing in common, so that none shares the blocks of another.
        prompt = [(index * 509 + position * 31) % 49_000 for position in range(508)]
        small_engine.add_request(f"r{index}", prompt, sampling)
        tokens[f"r{index}"] = 0
    cache = small_engine._runner._cache.tensor
    assert cache.nbytes == num_blocks * block_bytes

    most_running, most_waiting = 0, 0
    while small_engine.has_unfinished:
        outputs = small_engine.step()
        usage = small_engine.usage()
        most_running = max(most_running, usage.num_running)
        if usage.num_running == planned:
            most_waiting = max(most_waiting, usage.num_waiting)
        for output in outputs:
            assert output.failure is None
            tokens[output.request_id] += 1
    assert abs(most_running - planned) <= 0.05 * planned
    assert most_waiting == 2
    assert set(tokens.values()) == {4}, "none is truncated"
    assert small_engine.num_preemptions == 0
    small_engine.check_integrity()
