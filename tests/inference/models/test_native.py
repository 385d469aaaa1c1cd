"""The native step against the torch decoder on small random models of many shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.artifact import WEIGHTS, BrokenArtifact, read_manifest
from inference.config import RopeScaling
from inference.models import decoder as torch_decoder
from inference.models.attention import Span
from inference.models.decoder import Decoder
from inference.models.native import NativeDecoder
from inference.models.step import Step, StepModel
from tests.inference.kernels.native_calls import library
from tests.inference.quantized_artifact import quantize_artifact

CPU = torch.device("cpu")
NUM_BLOCKS = 160
NUM_POSITIONS = 400

LLAMA3 = RopeScaling(
    "llama3", 4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64
)
SHAPES: dict[str, dict[str, Any]] = {
    "one_key_head_for_three": {},
    "one_key_head_for_each": {"num_heads": 4, "num_kv_heads": 4},
    "one_key_head_for_all": {"num_heads": 40, "num_kv_heads": 1, "head_dim": 2},
    "untied": {"tie_word_embeddings": False},
    "wide_heads": {"head_dim": 80, "num_heads": 3, "num_kv_heads": 1},
    "whole_lanes": {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "hidden_size": 64},
    "llama3_scaling": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0, "head_dim": 16},
    "linear_scaling": {"rope_scaling": RopeScaling("linear", 2.0)},
    "odd_sizes": {"vocab_size": 331, "intermediate_size": 263, "hidden_size": 51, "head_dim": 6},
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "groups_of_32": {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16},
    "groups_of_64": {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64},
    "groups_of_128": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "head_dim": 128,
        "num_heads": 2,
        "num_kv_heads": 1,
        "tie_word_embeddings": False,
    },
}


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, *, omit: str = "", **shape: Any) -> Path: ...


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    library()
    torch.set_num_threads(1)


def _native(
    artifact: Path,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_threads: int = 1,
) -> NativeDecoder:
    return NativeDecoder.load(
        artifact,
        read_manifest(artifact),
        library=library(),
        block_size=block_size,
        num_positions=NUM_POSITIONS,
        dtype=dtype,
        num_threads=num_threads,
    )


def _torch(artifact: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    manifest = read_manifest(artifact)
    return Decoder.load(artifact, manifest, num_positions=NUM_POSITIONS, dtype=dtype, device=CPU)


class _Sequence:
    """A cache, and in it one sequence whose blocks lie scattered; what nobody wrote is no number."""

    def __init__(
        self, model: StepModel, *, dtype: torch.dtype = torch.float32, block_size: int = 16
    ) -> None:
        self._model = model
        shape = (2, NUM_BLOCKS, *model.block_shape(block_size))
        self._cache = torch.full(shape, torch.nan, dtype=dtype)
        order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(0)) + 1
        self._blocks = order.tolist()
        self._length = 0
        self._cache[:, 0] = 0.0  # the block that nobody writes

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Logits of all ``tokens``, which follow those before."""
        span = Span(self._length, len(tokens), self._blocks)
        self._length += len(tokens)
        return self._model.compute(Step(tokens, [span], range(len(tokens))), self._cache)


def _tokens(count: int) -> list[int]:
    return torch.randint(320, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def _in_chunks(sequence: _Sequence, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
    parts, start = [], 0
    for chunk in chunks:
        parts.append(sequence.extend(tokens[start : start + chunk]))
        start += chunk
    return torch.cat(parts)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_torch(
    write_tiny_artifact: WriteTinyArtifact, shape: str, block_size: int
) -> None:
    artifact = write_tiny_artifact(**SHAPES[shape])
    tokens = _tokens(140)
    native = _Sequence(_native(artifact, block_size=block_size), block_size=block_size)
    logits = _in_chunks(native, tokens, [70, 69, 1])
    expected = _Sequence(_torch(artifact)).extend(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["one_key_head_for_three", "wide_heads", "odd_sizes"])
def test_narrow_weights_and_cache_equal_those_of_torch(
    write_tiny_artifact: WriteTinyArtifact, tmp_path: Path, shape: str, dtype: torch.dtype
) -> None:
    source = write_tiny_artifact(**SHAPES[shape])
    manifest = read_manifest(source)
    (artifact := tmp_path / "rounded").mkdir()  # norms too, which torch would round
    rounded = {name: each.to(dtype) for name, each in load_file(source / WEIGHTS).items()}
    save_file(rounded, artifact / WEIGHTS)
    models: list[StepModel] = [
        NativeDecoder.load(
            artifact,
            manifest,
            library=library(),
            block_size=16,
            num_positions=NUM_POSITIONS,
            dtype=dtype,
            num_threads=1,
        ),
        Decoder.load(artifact, manifest, num_positions=NUM_POSITIONS, dtype=dtype, device=CPU),
    ]
    tokens = _tokens(140)
    logits, expected = (_Sequence(model, dtype=dtype).extend(tokens) for model in models)
    # The cache rounds: where a sum differs in its last bit, a key may differ in its 8th or 11th.
    limit = 2e-2 if dtype is torch.bfloat16 else 2e-3
    torch.testing.assert_close(logits, expected, atol=limit, rtol=0)
    assert (logits - expected).abs().mean() < limit / 20


class _QuantizingLinear:
    """A linear map in float64 whose input is rounded to int8 by row and group, as the kernel rounds it."""

    group = 32

    def __init__(self, weight: Tensor, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = weight.double()

    def __call__(self, rows: Tensor) -> Tensor:
        grouped = rows.view(rows.shape[0], -1, self.group)
        largest = grouped.abs().amax(-1, keepdim=True)
        codes = (grouped * (127 / largest).nan_to_num(posinf=0.0)).round()
        rounded = (codes.double() * (largest / 127).double()).view(rows.shape)
        return (rounded @ self._weight.T).float()

    def weight_rows(self, indices: Tensor) -> Tensor:
        return self._weight[indices].float()


@pytest.mark.parametrize("head", ["int8", "int4"])
@pytest.mark.parametrize("shape", QUANTIZED)
def test_quantised_models_equal_an_emulation_of_the_same_arithmetic(
    write_tiny_artifact: WriteTinyArtifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    head: str,
) -> None:
    group = int(shape.rpartition("_")[2])
    artifact = quantize_artifact(
        write_tiny_artifact(**QUANTIZED[shape]), tmp_path, group=group, head=head
    )
    tokens = _tokens(120)

    def run(model: StepModel) -> Tensor:
        short = [_Sequence(model).extend(tokens[at : at + 3]) for at in range(0, 120, 3)]
        return torch.cat(short)

    logits, plain = run(_native(artifact)), run(_torch(artifact))
    monkeypatch.setattr(torch_decoder, "Linear", _QuantizingLinear)
    monkeypatch.setattr(_QuantizingLinear, "group", group)
    off = (logits - run(_torch(artifact))).abs().amax(-1) / plain.std()  # [num_rows]
    # A last bit decides now and then between two codes: then a row is off by what one code is worth.
    assert (off < 2e-5).float().mean() > 0.6
    assert off.max() < 0.1
    rounding = (logits - plain).abs().amax(-1) / plain.std()
    assert 1e-3 < rounding.median() < 0.2


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_logits_depend_neither_on_chunks_nor_on_threads_nor_on_the_block_size(
    write_tiny_artifact: WriteTinyArtifact, tmp_path: Path, kind: str
) -> None:
    artifact = write_tiny_artifact(**QUANTIZED["groups_of_64"])
    if kind == "int4":
        artifact = quantize_artifact(artifact, tmp_path, group=64)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    tokens = _tokens(370)  # beyond the first split of 256 keys

    def run(chunks: Sequence[int], num_threads: int = 1, block_size: int = 16) -> Tensor:
        model = _native(artifact, dtype=dtype, num_threads=num_threads, block_size=block_size)
        sequence = _Sequence(model, dtype=dtype, block_size=block_size)
        return _in_chunks(sequence, tokens, chunks)

    whole = run([370])
    assert torch.equal(run([1] * 370), whole)
    assert torch.equal(run([7] * 52 + [6]), whole)
    assert torch.equal(run([255, 1, 1, 113], num_threads=2), whole)
    assert torch.equal(run([200, 170], num_threads=3, block_size=64), whole)


def test_what_an_earlier_owner_left_in_a_block_is_never_read(tiny_artifact: Path) -> None:
    # Every cache of these tests starts full of NaN, so a finite answer is the test.
    logits = _Sequence(_native(tiny_artifact)).extend(_tokens(17))
    assert logits.isfinite().all()


def test_a_step_without_logits_only_fills_the_cache(tiny_artifact: Path) -> None:
    model = _native(tiny_artifact)
    tokens = _tokens(20)
    cache = torch.zeros((2, 4, *model.block_shape(16)))
    table = [1, 2]
    first = model.compute(Step(tokens[:19], [Span(0, 19, table)], []), cache)
    last = model.compute(Step(tokens[19:], [Span(19, 1, table)], [0]), cache)
    assert first.shape == (0, 320)
    assert torch.equal(last[0], _Sequence(model).extend(tokens)[-1])


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step([320], [Span(0, 1, [1])], [0]), "not in the vocabulary"),
        (Step([-1], [Span(0, 1, [1])], [0]), "not in the vocabulary"),
        (Step([1], [Span(0, 1, [4])], [0]), "outside of the cache"),
        (Step([1], [Span(NUM_POSITIONS, 1, list(range(30)))], [0]), "outside of the context"),
        (Step([1, 2], [Span(0, 1, [1])], [0]), "do not hold"),
        (Step([1], [Span(0, 1, [1])], [1]), "does not exist"),
    ],
)
def test_a_step_that_would_read_elsewhere_is_refused(
    tiny_artifact: Path, step: Step, said: str
) -> None:
    model = _native(tiny_artifact)
    cache = torch.zeros((2, 4, *model.block_shape(16)))
    with pytest.raises(RuntimeError, match=said):
        model.compute(step, cache)


def test_a_block_table_that_is_too_short_is_refused(tiny_artifact: Path) -> None:
    model = _native(tiny_artifact)
    cache = torch.zeros((2, 4, *model.block_shape(16)))
    with pytest.raises(ValueError, match="does not cover 17 positions"):
        model.compute(Step([1], [Span(16, 1, [1])], [0]), cache)


def test_a_missing_tensor_is_named(write_tiny_artifact: WriteTinyArtifact) -> None:
    with pytest.raises(BrokenArtifact, match=r"down_proj.weight: the tensor is missing"):
        _native(write_tiny_artifact(omit="model.layers.1.mlp.down_proj.weight"))


def test_scales_that_do_not_fit_their_codes_are_refused(
    write_tiny_artifact: WriteTinyArtifact, tmp_path: Path
) -> None:
    artifact = quantize_artifact(
        write_tiny_artifact(**QUANTIZED["groups_of_64"]), tmp_path, group=64
    )
    name = "model.layers.0.mlp.up_proj.weight.minimum"
    weights = load_file(artifact / WEIGHTS)
    weights[name] = weights[name][:, :1].contiguous()
    (broken := tmp_path / "broken").mkdir()
    save_file(weights, broken / WEIGHTS)
    with pytest.raises(BrokenArtifact, match=r"up_proj.weight: scales"):
        NativeDecoder.load(
            broken,
            read_manifest(artifact),
            library=library(),
            block_size=16,
            num_positions=8,
            dtype=torch.float32,
            num_threads=1,
        )
