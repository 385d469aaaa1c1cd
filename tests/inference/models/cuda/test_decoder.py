"""The CUDA step's own code on the CPU, where nothing is captured: buckets, padding, slots, attention, int4."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from inference.artifact import BrokenArtifact
from inference.config import RopeScaling
from inference.models.cuda.decoder import CudaDecoder
from inference.models.cuda.graphs import DecodeGraphs
from inference.models.step import Step
from tests.inference.models.cuda.small_decoder import (
    SHAPE,
    Sequences,
    cuda_decoder,
    plain_decoder,
    run_script,
    tokens,
)
from tests.inference.quantized_artifact import quantize_artifact

LLAMA3 = RopeScaling(
    "llama3", 4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64
)
SHAPES: dict[str, dict[str, Any]] = {
    "one_key_head_for_three": {},
    "one_key_head_for_each": {"num_heads": 4, "num_kv_heads": 4},
    "one_key_head_for_all": {"num_heads": 8, "num_kv_heads": 1},
    "untied": {"tie_word_embeddings": False},
    "llama3_scaling": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0, "head_dim": 16},
    "odd_sizes": {"vocab_size": 331, "intermediate_size": 263, "hidden_size": 51, "head_dim": 6},
}


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(
        self, *, omit: str = "", poisoned_token: int | None = None, **shape: Any
    ) -> Path: ...


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _worst(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [*((shape, 16) for shape in SHAPES), ("untied", 64), ("one_key_head_for_three", 4)],
)
def test_logits_equal_those_of_plain_torch(
    write_tiny_artifact: WriteTinyArtifact, shape: str, block_size: int
) -> None:
    artifact = write_tiny_artifact(**SHAPES[shape])
    decoder = cuda_decoder(artifact, block_size=block_size)
    logits = run_script(Sequences(decoder, block_size=block_size))
    expected = run_script(Sequences(plain_decoder(artifact)))
    assert min(step.std() for step in expected) > 0.1
    assert _worst(logits, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_stay_close_to_float32_on_the_same_weights(
    write_tiny_artifact: WriteTinyArtifact, dtype: torch.dtype
) -> None:
    artifact = write_tiny_artifact(**SHAPE)
    logits = run_script(Sequences(cuda_decoder(artifact, dtype=dtype), dtype))
    expected = run_script(Sequences(plain_decoder(artifact, dtype)))
    distance = torch.cat(logits) - torch.cat(expected)
    assert distance.std() < 0.02 * torch.cat(expected).std()


@pytest.mark.parametrize("group", [32, 64])
def test_int4_matrices_stay_int4_and_give_what_their_numbers_give(
    write_tiny_artifact: WriteTinyArtifact, tmp_path: Path, group: int
) -> None:
    artifact = quantize_artifact(write_tiny_artifact(**SHAPE), tmp_path, group=group)
    decoder = cuda_decoder(artifact, dtype=torch.bfloat16)
    assert decoder.describe_numerics()["kernel"] == "cuda sdpa int4"
    logits = torch.cat(run_script(Sequences(decoder, torch.bfloat16)))
    expected = torch.cat(run_script(Sequences(plain_decoder(artifact))))
    assert (logits - expected).std() < 0.05 * expected.std()


def test_int4_matrices_are_widened_where_the_kernel_cannot_take_them(
    write_tiny_artifact: WriteTinyArtifact, tmp_path: Path
) -> None:
    artifact = quantize_artifact(write_tiny_artifact(**SHAPE), tmp_path, group=32)
    decoder = cuda_decoder(artifact, dtype=torch.float32)
    assert decoder.describe_numerics()["kernel"] == "cuda sdpa"
    logits = run_script(Sequences(decoder))
    assert _worst(logits, run_script(Sequences(plain_decoder(artifact)))) < 1e-4


def test_rows_that_fill_a_bucket_up_leave_block_zero_clean(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    # Such a row holds token 0; were it computed, block 0 would be no number, and with it every short table's end.
    sequences = Sequences(cuda_decoder(write_tiny_artifact(poisoned_token=0)))
    prompts = {name: [1 + token for token in tokens(20 + name)] for name in range(5)}
    sequences.extend(prompts)
    logits = sequences.extend({name: [1 + name] for name in range(5)})
    assert not sequences.cache[:, 0].any()
    assert logits[:, 1:].isfinite().all()  # of token 0 itself the tied head makes no number
    assert sequences.extend({0: [0]}).isnan().all()  # what the token is really like


def test_a_decode_step_takes_the_smallest_bucket_and_more_rows_than_that_are_eager(
    write_tiny_artifact: WriteTinyArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[int, int]] = []
    inner = DecodeGraphs._answer

    def answer(self: DecodeGraphs, bucket: Any, cache: Tensor) -> Tensor:
        packed.append(tuple(bucket.packed.shape))
        return inner(self, bucket, cache)

    monkeypatch.setattr(DecodeGraphs, "_answer", answer)
    sequences = Sequences(cuda_decoder(write_tiny_artifact(), max_num_seqs=6))
    sequences.extend({name: tokens(3) for name in range(7)})
    for count in (1, 2, 3, 5, 7):
        sequences.extend({name: [4] for name in range(count)})
    assert [rows for rows, _ in packed] == [1, 2, 4, 6]
    assert {width for _, width in packed} == {3 + 8}  # a split of 128 keys in blocks of 16


def test_only_the_rows_that_are_asked_for_are_answered(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    sequences = Sequences(cuda_decoder(write_tiny_artifact()))
    sequences.extend({name: tokens(9, name) for name in range(3)})
    step = Step([5, 6, 7], [sequences._span(name, 1) for name in range(3)], [2, 0])
    every = sequences.model.compute(Step(step.token_ids, step.spans, [0, 1, 2]), sequences.cache)
    some = sequences.model.compute(step, sequences.cache)
    assert torch.equal(some, every[[2, 0]])
    assert sequences.model.compute(Step([5], step.spans[:1], []), sequences.cache).shape[0] == 0


def test_what_may_change_a_sum_is_among_the_facts(write_tiny_artifact: WriteTinyArtifact) -> None:
    artifact = write_tiny_artifact()
    facts = cuda_decoder(artifact).describe_numerics()
    assert facts["batch_invariant"] == "no"
    assert facts["kernel"] == "cuda sdpa"
    assert facts["kept_as"] == facts["computed_in"] == "torch.float32"
    assert facts != cuda_decoder(artifact, max_num_seqs=16).describe_numerics()


def test_a_missing_tensor_is_named(write_tiny_artifact: WriteTinyArtifact) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(BrokenArtifact, match=name):
        cuda_decoder(write_tiny_artifact(omit=name))


def test_no_graph_is_captured_on_a_cpu(write_tiny_artifact: WriteTinyArtifact) -> None:
    decoder: CudaDecoder = cuda_decoder(write_tiny_artifact(), captures=True)
    run_script(Sequences(decoder))
    assert decoder.graphs.num_captured == 0
