"""GGUF files, written by llama.cpp's own Python package, become our artifact."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from inference.artifact import BrokenArtifact, read_manifest, verify
from inference.config import RopeScaling
from inference.importers.checkpoint import expected_shapes, from_bfloat16, to_bfloat16
from inference.importers.gguf import import_gguf
from inference.importers.gguf_config import llama3_factors
from inference.quantization import SCHEMES

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
IM_END, EOT = 257, 258
METADATA: dict[str, Any] = {
    "general.name": "Tiny",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 50_000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": IM_END,
    "tokenizer.chat_template": "{{ messages }}",
}
# `a b` merges to a token that must be there.
TOKENS[TOKENS.index("ÿ")] = "ab"

Weights = dict[str, npt.NDArray[np.float32]]
WriteGguf = Callable[..., Path]


def _weights() -> Weights:
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (len(TOKENS), HIDDEN),
    }
    for index in range(LAYERS):
        shapes |= {
            f"blk.{index}.attn_norm.weight": (HIDDEN,),
            f"blk.{index}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{index}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{index}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{index}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{index}.ffn_norm.weight": (HIDDEN,),
            f"blk.{index}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{index}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{index}.ffn_down.weight": (HIDDEN, INNER),
        }
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            add[type(value)](key, value)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """A function that writes a tiny Llama; None as a metadata value or a tensor leaves it out."""

    def write(
        kind: Type = Type.F32,
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, npt.NDArray[np.float32] | None] | None = None,
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        values = METADATA | dict(metadata or {})
        _add_metadata(writer, {key: value for key, value in values.items() if value is not None})
        for name, tensor in (_weights() | dict(tensors or {})).items():
            if tensor is None:
                continue
            stored = kind if tensor.ndim == 2 else Type.F32
            writer.add_tensor(name, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _permute(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows in llama.cpp's order, as its converter moves them."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _dequantised(path: Path) -> Weights:
    """Every tensor of a GGUF file by the gguf package."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(
            tuple(reversed(tensor.shape.tolist()))
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def _stored(artifact: Path) -> Weights:
    """Every weight of an artifact in float32, under Hugging Face's names."""
    manifest = read_manifest(artifact)
    raw = json.loads((artifact / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    if raw["model.norm.weight"]["dtype"] == "BF16":
        return _stored_bfloat16(artifact, raw)
    tensors = load_file(artifact / "model.safetensors")
    return {
        name: tensors[name]
        if name in tensors
        else next(s for s in SCHEMES.values() if f"{name}.{s.name}" in tensors).read(name, tensors)
        for name in expected_shapes(manifest.model)
    }


def _stored_bfloat16(artifact: Path, header: Mapping[str, Any]) -> Weights:
    data = (artifact / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return {
        name: from_bfloat16(
            np.frombuffer(
                data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], np.uint16
            )
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def _gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.layers.", "blk."),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ):
        name = name.replace(ours, theirs)
    return name


def _as_gguf(name: str, weight: npt.NDArray[Any], heads: int, kv_heads: int) -> npt.NDArray[Any]:
    """Our weight with its rows where llama.cpp has them."""
    if "q_proj" in name:
        return _permute(weight, heads)
    return _permute(weight, kv_heads) if "k_proj" in name else weight


@pytest.mark.parametrize(
    "kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_1, Type.Q4_0], ids=lambda k: k.name
)
def test_keeping_a_tensor_type_loses_nothing(
    write_gguf: WriteGguf, tmp_path: Path, kind: Type
) -> None:
    path = write_gguf(kind)

    artifact = import_gguf(path, tmp_path / "root", keep_quantized=True)

    theirs, ours = _dequantised(path), _stored(artifact)
    assert {_gguf_name(name) for name in ours} == theirs.keys()
    for name, weight in ours.items():
        assert np.array_equal(_as_gguf(name, weight, HEADS, KV_HEADS), theirs[_gguf_name(name)]), (
            name
        )
    expected = {"Q8_0": "int8", "Q4_1": "int4", "Q4_0": "int4"}.get(kind.name, "none")
    assert verify(artifact).quantization == expected


def test_dequantising_to_bfloat16_rounds_each_weight_once(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    path = write_gguf(Type.Q4_1)

    artifact = import_gguf(path, tmp_path / "root", dtype="bfloat16")

    theirs, manifest = _dequantised(path), verify(artifact)
    assert (manifest.quantization, manifest.stored_dtype) == ("none", "bfloat16")
    for name, weight in _stored(artifact).items():
        exact = theirs[_gguf_name(name)]
        assert np.array_equal(
            _as_gguf(name, weight, HEADS, KV_HEADS), from_bfloat16(to_bfloat16(exact))
        ), name


def test_the_shape_comes_from_the_metadata(write_gguf: WriteGguf, tmp_path: Path) -> None:
    manifest = read_manifest(import_gguf(write_gguf(), tmp_path / "root"))

    model = manifest.model
    assert (model.hidden_size, model.intermediate_size, model.num_layers) == (HIDDEN, INNER, LAYERS)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (model.vocab_size, model.context_length) == (len(TOKENS), 128)
    assert (model.rms_norm_eps, model.rope_theta) == (1e-5, 50_000.0)
    assert not model.tie_word_embeddings
    assert manifest.num_parameters == sum(weight.size for weight in _weights().values())
    assert manifest.source["name"] == "tiny.gguf"
    assert manifest.source["title"] == "Tiny"


def test_without_an_output_tensor_the_head_is_the_embedding(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    artifact = import_gguf(write_gguf(tensors={"output.weight": None}), tmp_path / "root")

    manifest = read_manifest(artifact)
    assert manifest.model.tie_word_embeddings
    assert "lm_head.weight" not in _stored(artifact)
    rest = [weight.size for name, weight in _weights().items() if name != "output.weight"]
    assert manifest.num_parameters == sum(rest)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, (IM_END,)),
        ({"tokenizer.ggml.eot_token_id": EOT}, (IM_END, EOT)),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "<|im_end|>"}, (0, IM_END)),
        ({"tokenizer.chat_template": "<|im_end|>"}, (IM_END,)),
        ({"tokenizer.chat_template": "<|end_of_turn|>"}, (IM_END,)),
    ],
)
def test_answers_also_end_where_the_chat_template_ends_a_turn(
    write_gguf: WriteGguf, tmp_path: Path, metadata: dict[str, Any], expected: tuple[int, ...]
) -> None:
    artifact = import_gguf(write_gguf(metadata=metadata), tmp_path / "root")

    assert read_manifest(artifact).model.eos_token_ids == expected


def test_linear_rope_scaling_is_read(write_gguf: WriteGguf, tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}

    artifact = import_gguf(write_gguf(metadata=metadata), tmp_path / "root")

    assert read_manifest(artifact).model.rope_scaling == RopeScaling("linear", 4.0)


def test_the_frequency_factors_of_llama_3_are_recognised(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    scaling = RopeScaling("llama3", 8.0)
    factors = llama3_factors(scaling, 50_000.0, HEAD_DIM).astype(np.float32)

    path = write_gguf(tensors={"rope_freqs.weight": factors})
    artifact = import_gguf(path, tmp_path / "root")

    assert read_manifest(artifact).model.rope_scaling == scaling


@pytest.mark.parametrize(
    ("metadata", "named", "code"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count", "unsupported_model"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count", "unsupported_model"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type", "unsupported_model"),
        ({"llama.attention.key_length": 32}, "llama.rope.dimension_count", "unsupported_model"),
        ({"llama.attention.head_count": 0}, "head size 64", "unsupported_model"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads=3", "unsupported_model"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base", "unsupported_model"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base", "unsupported_model"),
        ({"llama.block_count": 2_000_000_000}, "num_layers", "broken_artifact"),
        ({"llama.context_length": 2_000_000_000}, "context_length", "broken_artifact"),
        ({"llama.block_count": None}, "llama.block_count", "broken_artifact"),
        ({"llama.block_count": "two"}, "llama.block_count", "broken_artifact"),
        ({"llama.block_count": 3}, "model.layers.2.input_layernorm.weight", "broken_artifact"),
        ({"llama.block_count": 1}, "model.layers.1.input_layernorm.weight", "unsupported_model"),
        ({"llama.feed_forward_length": 64}, "mlp.gate_proj.weight", "broken_artifact"),
        ({"tokenizer.ggml.eos_token_id": 5_000}, "eos_token_id", "broken_artifact"),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id", "broken_artifact"),
        ({"tokenizer.ggml.bos_token_id": 5_000}, "bos_token_id", "broken_artifact"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre: 'viking'", "unsupported_model"),
        ({"tokenizer.chat_template": "{% if"}, "chat template", "broken_artifact"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template", "broken_artifact"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    write_gguf: WriteGguf, tmp_path: Path, metadata: dict[str, Any], named: str, code: str
) -> None:
    path = write_gguf(metadata=metadata)

    with pytest.raises(BrokenArtifact, match=named) as caught:
        import_gguf(path, tmp_path / "root")

    assert caught.value.code == code
    assert not (tmp_path / "root").exists()


def test_another_architecture_is_refused_by_its_name(write_gguf: WriteGguf, tmp_path: Path) -> None:
    with pytest.raises(BrokenArtifact, match="'mamba' is not supported, only 'llama'"):
        import_gguf(write_gguf(architecture="mamba"), tmp_path / "root")


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    small = {name: _weights()[name][:200] for name in ("token_embd.weight", "output.weight")}

    with pytest.raises(BrokenArtifact, match="its ids reach 258, the embedding has 200 rows"):
        import_gguf(write_gguf(tensors=small), tmp_path / "root")


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, "blk.0.attn_q.bias"),
        ({"blk.00.attn_q.weight": np.ones((64, 64), np.float32)}, "blk.00.attn_q.weight"),
        (
            {
                "blk.0.attn_q.weight": None,
                "model.layers.0.self_attn.q_proj.weight": np.ones((64, 64), np.float32),
            },
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ({"blk.1.ffn_up.weight": None}, "model.layers.1.mlp.up_proj.weight: missing"),
        ({"output_norm.weight": np.ones(32, np.float32)}, "model.norm.weight"),
        ({"rope_freqs.weight": np.full(8, 2.0, np.float32)}, "rope_freqs.weight"),
        ({"output_norm.weight": np.full(64, np.nan, np.float32)}, "output_norm.weight: it holds"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(
    write_gguf: WriteGguf, tmp_path: Path, tensors: Weights, named: str
) -> None:
    path = write_gguf(tensors=tensors)

    with pytest.raises(BrokenArtifact, match=named):
        import_gguf(path, tmp_path / "root")

    assert not list((tmp_path / "root").glob("*"))


def test_a_quantised_scale_that_is_not_finite_is_refused(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    path = write_gguf(Type.Q4_0)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    with path.open("r+b") as file:
        file.seek(tensor.data_offset)
        file.write(np.float16(9_000).tobytes())  # finite itself, but 8 times it is not

    with pytest.raises(BrokenArtifact, match=r"blk\.1\.ffn_down\.weight: it holds"):
        import_gguf(path, tmp_path / "root", keep_quantized=True)


@pytest.mark.slow
def test_the_demonstration_weights_are_kept_bit_for_bit(
    gguf_path: Path, real_artifact: Path
) -> None:
    ours, manifest = _stored(real_artifact), verify(real_artifact)
    theirs = _dequantised(gguf_path)

    assert manifest.num_parameters == 134_515_008
    assert {_gguf_name(name) for name in ours} == theirs.keys()
    for name, weight in ours.items():
        rows = _as_gguf(name, weight, manifest.model.num_heads, manifest.model.num_kv_heads)
        assert np.array_equal(rows.view(np.uint32), theirs[_gguf_name(name)].view(np.uint32)), name
