"""The decoder against Hugging Face's own implementation, on small random models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from inference.artifact import WEIGHTS, BrokenArtifact, Manifest, read_manifest
from inference.config import InvalidConfig, ModelConfig, RopeScaling
from inference.models.attention import AttentionBatch, AttentionShape, Span
from inference.models.decoder import Decoder
from inference.models.layers import MIN_ROWS
from inference.models.numerics import compute_dtype
from inference.quantization import SCHEMES

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64

LLAMA3 = RopeScaling(
    "llama3", 4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64
)
SHAPES: dict[str, dict[str, Any]] = {
    "one_key_head_for_three": {},
    "one_key_head_for_each": {"num_heads": 4, "num_kv_heads": 4},
    "one_key_head_for_all": {"num_heads": 8, "num_kv_heads": 1},
    "untied": {"tie_word_embeddings": False},
    "wide_heads": {"head_dim": 80, "num_heads": 3, "num_kv_heads": 1},
    "llama3_scaling": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0, "head_dim": 16},
    "linear_scaling": {"rope_scaling": RopeScaling("linear", 2.0)},
    "many_outputs": {"vocab_size": 1031, "intermediate_size": 263},
}


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, *, omit: str = "", **shape: Any) -> Path: ...


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _load(
    artifact: Path, manifest: Manifest | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    manifest = manifest or read_manifest(artifact)
    return Decoder.load(artifact, manifest, num_positions=256, dtype=dtype, device=CPU)


class _Cache:
    """A cache of one sequence whose blocks lie scattered, for decoders without an engine around them."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype = torch.float32) -> None:
        model = decoder.model
        self.decoder = decoder
        self.shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, BLOCK_SIZE)
        self.tensor = torch.zeros(
            (model.num_layers, NUM_BLOCKS, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim),
            dtype=dtype,
        )
        self.blocks = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(0)) + 1

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], start: int, *, shift: int = 0) -> Tensor:
        """Logits of all ``tokens``, which stand from position ``start``; ``shift`` gives them wrong positions."""
        span = Span(start, len(tokens), self.blocks.tolist())
        padding = max(MIN_ROWS - len(tokens), 0)
        positions = [*range(start + shift, start + shift + len(tokens)), *([0] * padding)]
        logits = self.decoder.forward(
            torch.tensor([*tokens, *([0] * padding)]),
            torch.tensor(positions),
            torch.arange(len(tokens) + padding),
            AttentionBatch.from_spans(self.shape, [span], CPU),
            self.tensor,
        )
        return logits[: len(tokens)]


def _reference(artifact: Path) -> Any:
    model = read_manifest(artifact).model
    reference: Any = LlamaForCausalLM(_reference_config(model))
    reference.eval()
    weights = load_file(artifact / WEIGHTS)
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if model.tie_word_embeddings else set())
    assert not unexpected
    return reference


def _reference_config(model: ModelConfig) -> LlamaConfig:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling := model.rope_scaling:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context_length,
            }
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.context_length,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=False,
        mlp_bias=False,
        pad_token_id=None,
    )


def _tokens(count: int, *, vocab_size: int = 320) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers(
    write_tiny_artifact: WriteTinyArtifact, shape: str
) -> None:
    artifact = write_tiny_artifact(**SHAPES[shape])
    tokens = _tokens(150)
    with torch.inference_mode():
        expected = _reference(artifact)(torch.tensor([tokens])).logits[0]

    cache = _Cache(_load(artifact))
    chunks = [cache.extend(tokens[:70], 0), cache.extend(tokens[70:139], 70)]
    chunks += [cache.extend(tokens[at : at + 1], at) for at in range(139, 150)]
    logits = torch.cat(chunks)

    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_position_shifted_by_one_is_noticed(tiny_artifact: Path) -> None:
    tokens = _tokens(40)
    cache, shifted = _Cache(_load(tiny_artifact)), _Cache(_load(tiny_artifact))

    expected = [cache.extend(tokens[:30], 0), cache.extend(tokens[30:], 30)][1]
    logits = [shifted.extend(tokens[:30], 0), shifted.extend(tokens[30:], 30, shift=1)][1]

    assert (logits - expected).abs().max() > 1e-3


def test_greedy_tokens_equal_those_of_transformers(tiny_artifact: Path) -> None:
    tokens = _tokens(20)
    expected = _reference(tiny_artifact).generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )

    cache = _Cache(_load(tiny_artifact))
    logits = cache.extend(tokens, 0)
    for position in range(20, 60):
        tokens.append(int(logits[-1].argmax()))
        logits = cache.extend(tokens[-1:], position)

    assert tokens == expected[0].tolist()
    assert len(set(tokens[20:])) > 5


@pytest.mark.parametrize("chunk", [1, 3, 7, 64, 150])
def test_no_bit_depends_on_the_size_of_a_chunk(tiny_artifact: Path, chunk: int) -> None:
    tokens = _tokens(150)
    whole = _Cache(_load(tiny_artifact)).extend(tokens, 0)

    cache = _Cache(_load(tiny_artifact))
    parts = [cache.extend(tokens[at : at + chunk], at) for at in range(0, 150, chunk)]

    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_rounded_and_then_computed_in_float32_on_a_cpu(
    write_tiny_artifact: WriteTinyArtifact, dtype: torch.dtype
) -> None:
    artifact = write_tiny_artifact(tie_word_embeddings=False)
    tokens = _tokens(50)
    reference = _reference(artifact)
    with torch.inference_mode():
        for weight in reference.parameters():
            weight.copy_(weight.to(dtype))
        expected = reference(torch.tensor([tokens])).logits[0]

    decoder = _load(artifact, dtype=dtype)
    logits = _Cache(decoder).extend(tokens, 0)

    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert compute_dtype(dtype, CPU) == torch.float32
    assert compute_dtype(dtype, torch.device("cuda")) == dtype


def test_quantised_weights_are_dequantised_exactly(
    write_tiny_artifact: WriteTinyArtifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = write_tiny_artifact(hidden_size=64, head_dim=16, num_heads=4)
    weights = load_file(artifact / WEIGHTS)
    quantised = {
        **_quantise(weights, "model.embed_tokens.weight", "int8"),
        **_quantise(weights, "model.layers.1.self_attn.k_proj.weight", "int4"),
    }
    whole = {name.rpartition(".")[0] for name in quantised}
    rest = {name: weight for name, weight in weights.items() if name not in whole}
    for directory, tensors in (("plain", weights), ("quantised", {**rest, **quantised})):
        (tmp_path / directory).mkdir()
        save_file(tensors, tmp_path / directory / WEIGHTS)

    manifest = read_manifest(artifact)
    expected = _Cache(_load(tmp_path / "plain", manifest)).extend(_tokens(40), 0)
    with caplog.at_level(logging.INFO):
        decoder = _load(tmp_path / "quantised", manifest)

    assert torch.equal(_Cache(decoder).extend(_tokens(40), 0), expected)
    assert "1 int4 dequantised, 1 int8 dequantised" in caplog.text


def _quantise(weights: dict[str, Tensor], name: str, scheme: str) -> dict[str, Tensor]:
    """Random codes and scales as the parts of ``name``, whose weights become what they stand for."""
    rows, columns = weights[name].shape
    scale = torch.rand(rows, columns // 32).half() / 16
    if scheme == "int4":
        codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
        parts = {"int4": codes, "scale": scale, "minimum": -8 * scale}
    else:
        parts = {"int8": torch.randint(-9, 9, (rows, columns), dtype=torch.int8), "scale": scale}
    tensors = {f"{name}.{part}": tensor for part, tensor in parts.items()}
    arrays = {part: tensor.numpy() for part, tensor in tensors.items()}
    weights[name] = torch.from_numpy(SCHEMES[scheme].read(name, arrays))
    return tensors


def test_a_narrow_cache_costs_little_accuracy(tiny_artifact: Path) -> None:
    tokens = _tokens(50)
    decoder = _load(tiny_artifact)
    exact = _Cache(decoder).extend(tokens, 0)
    rounded = _Cache(decoder, torch.bfloat16).extend(tokens, 0)
    assert 0 < (rounded - exact).abs().max() < 0.05


def test_a_missing_tensor_is_named(write_tiny_artifact: WriteTinyArtifact) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    artifact = write_tiny_artifact(omit=name)
    with pytest.raises(BrokenArtifact, match=rf"{name}: the tensor is missing"):
        _load(artifact)


def test_a_tensor_that_belongs_to_nothing_is_named(tiny_artifact: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_artifact / WEIGHTS)
    save_file({**weights, "lm_head.weight": torch.zeros(320, 48)}, tmp_path / WEIGHTS)
    with pytest.raises(BrokenArtifact, match=r"lm_head.weight: 1 tensors belong to no part"):
        _load(tmp_path, read_manifest(tiny_artifact))


def test_a_tensor_of_another_shape_is_named(tiny_artifact: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_artifact / WEIGHTS)
    weights["model.norm.weight"] = torch.ones(47)
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(BrokenArtifact, match=r"its shape is \(47,\), the model's is \(48,\)"):
        _load(tmp_path, read_manifest(tiny_artifact))


def test_a_file_that_was_cut_off_is_named(tiny_artifact: Path, tmp_path: Path) -> None:
    whole = (tiny_artifact / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(BrokenArtifact, match=WEIGHTS):
        _load(tmp_path, read_manifest(tiny_artifact))


def test_an_unknown_family_is_refused(write_tiny_artifact: WriteTinyArtifact) -> None:
    artifact = write_tiny_artifact(family="gpt2")
    with pytest.raises(InvalidConfig, match="family='gpt2' is not one we run; known are llama"):
        _load(artifact)
