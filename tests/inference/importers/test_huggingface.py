"""A Hugging Face directory becomes our artifact, and nothing in it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open

from inference.artifact import BrokenArtifact, read_manifest, verify
from inference.config import RopeScaling
from inference.importers.checkpoint import EMBEDDING, HEAD, from_bfloat16, to_bfloat16
from tests.inference.importers.small_checkpoint import (
    CONFIG,
    IM_END,
    Checkpoint,
    Weights,
    make_weights,
    write_checkpoint,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A valid directory."""
    return write_checkpoint(tmp_path)


def _stored(artifact: Path) -> Weights:
    with safe_open(artifact / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _stored_bits(artifact: Path, name: str) -> npt.NDArray[np.uint16]:
    raw = (artifact / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])[name]
    assert entry["dtype"] == "BF16"
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(raw[start:end], np.uint16).reshape(entry["shape"])


def test_the_weights_are_stored_under_their_names(checkpoint: Checkpoint) -> None:
    artifact = checkpoint.run("float32")

    stored, weights = _stored(artifact), make_weights()
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.array_equal(stored[name], weight), name
    manifest = verify(artifact)
    assert manifest.num_parameters == sum(weight.size for weight in weights.values())
    assert (manifest.quantization, manifest.stored_dtype) == ("none", "float32")
    assert manifest.source["format"] == "huggingface"
    assert manifest.source["name"] == "model"


def test_half_precision_is_converted_through_float32(checkpoint: Checkpoint) -> None:
    halves = {name: weight.astype(np.float16) for name, weight in make_weights().items()}
    checkpoint.save(halves)

    artifact = checkpoint.run("bfloat16")

    for name, half in halves.items():
        expected = to_bfloat16(half.astype(np.float32))
        assert np.array_equal(_stored_bits(artifact, name), expected), name


def test_the_shape_is_read_from_the_configuration(checkpoint: Checkpoint) -> None:
    model = read_manifest(checkpoint.run()).model

    assert (model.hidden_size, model.intermediate_size, model.num_layers) == (16, 24, 2)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 4)
    assert (model.vocab_size, model.context_length, model.bos_token_id) == (258, 64, 256)
    assert (model.rms_norm_eps, model.rope_theta) == (1e-6, 20_000.0)
    assert model.rope_scaling is None


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "scaling", "theta"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0), 20_000.0),
        (
            {"rope_scaling": {"rope_type": "llama3", "type": "yarn", **LLAMA3}},
            RopeScaling("llama3", 8.0, 1.0, 2.0, 32),
            20_000.0,
        ),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            },
            RopeScaling("llama3", 8.0, 1.0, 2.0, 32),
            5e5,
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
            None,
            3e4,
        ),
    ],
)
def test_rope_is_read_in_the_old_and_the_new_spelling(
    checkpoint: Checkpoint, changes: dict[str, Any], scaling: RopeScaling | None, theta: float
) -> None:
    checkpoint.configure(**changes)

    model = read_manifest(checkpoint.run()).model

    assert model.rope_scaling == scaling
    assert model.rope_theta == theta


def test_shards_are_joined_by_their_index(checkpoint: Checkpoint) -> None:
    weights = make_weights()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    (checkpoint.path / "model.safetensors").unlink()
    for shard, held in shards.items():
        checkpoint.save({name: weights[name] for name in held}, shard)
    index = {name: shard for shard, held in shards.items() for name in held}
    checkpoint.write_json("model.safetensors.index.json", {"weight_map": index})

    stored = _stored(checkpoint.run())

    assert all(np.array_equal(stored[name], weights[name]) for name in names)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({}, "weight_map"),
        ({"a": "../model.safetensors"}, "is no file of the directory"),
        ({"a": "/etc/passwd"}, "is no file of the directory"),
        ({"a": "gone.safetensors"}, "is no file of the directory"),
        ({"a": 3}, "is no file of the directory"),
        ({"a": "one.safetensors"}, "does not hold it|does not place it"),
    ],
)
def test_an_index_that_lies_is_refused(
    checkpoint: Checkpoint, weight_map: dict[str, Any], named: str
) -> None:
    (checkpoint.path / "model.safetensors").rename(checkpoint.path / "one.safetensors")
    checkpoint.write_json("model.safetensors.index.json", {"weight_map": weight_map})

    with pytest.raises(BrokenArtifact, match=named):
        checkpoint.run()


def test_a_file_and_an_index_together_are_refused(checkpoint: Checkpoint) -> None:
    checkpoint.write_json("model.safetensors.index.json", {"weight_map": {}})

    assert "both are there" in str(checkpoint.refusal())


def test_without_a_head_the_model_is_tied_whatever_it_says(checkpoint: Checkpoint) -> None:
    weights = make_weights()
    del weights[HEAD]
    checkpoint.save(weights)

    manifest = read_manifest(checkpoint.run())

    assert manifest.model.tie_word_embeddings
    assert manifest.num_parameters == sum(weight.size for weight in weights.values())


def test_an_equal_head_of_a_tied_model_is_left_out(checkpoint: Checkpoint) -> None:
    weights = make_weights()
    checkpoint.save(weights | {HEAD: weights[EMBEDDING]})
    checkpoint.configure(tie_word_embeddings=True)

    artifact = checkpoint.run()

    assert read_manifest(artifact).model.tie_word_embeddings
    assert HEAD not in _stored(artifact)


def test_a_tied_model_with_another_head_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.configure(tie_word_embeddings=True)

    refusal = checkpoint.refusal()

    assert "tie_word_embeddings" in str(refusal)
    assert HEAD in str(refusal)


def test_saved_rotary_frequencies_are_left_out(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoint.save(make_weights() | {name: np.ones(2, np.float32)})

    assert name not in _stored(checkpoint.run())


@pytest.mark.parametrize(
    ("generation", "template", "expected"),
    [
        (None, None, (256,)),
        ({"eos_token_id": [IM_END, 256]}, None, (IM_END, 256)),
        ({"eos_token_id": IM_END}, None, (IM_END, 256)),
        (None, "{{ m }}<|im_end|>", (256, IM_END)),
    ],
)
def test_every_end_of_an_answer_is_known(
    checkpoint: Checkpoint,
    generation: dict[str, Any] | None,
    template: str | None,
    expected: tuple[int, ...],
) -> None:
    if generation is not None:
        checkpoint.write_json("generation_config.json", generation)
    if template is not None:
        (checkpoint.path / "chat_template.jinja").write_text(template)

    assert read_manifest(checkpoint.run()).model.eos_token_ids == expected


def test_generation_defaults_are_taken_over(checkpoint: Checkpoint) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 9}
    checkpoint.write_json("generation_config.json", generation)

    defaults = read_manifest(checkpoint.run()).generation_defaults

    assert defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("chat_template.jinja", "A"),
        ("tokenizer_config.json", "A"),
        (
            "tokenizer_config.json",
            [{"name": "tool", "template": "B"}, {"name": "default", "template": "A"}],
        ),
    ],
)
def test_the_chat_template_is_found_where_it_may_be(
    checkpoint: Checkpoint, where: str, value: Any
) -> None:
    if where.endswith(".jinja"):
        (checkpoint.path / where).write_text(value)
        checkpoint.write_json("tokenizer_config.json", {"chat_template": "older"})
    else:
        checkpoint.write_json(where, {"chat_template": value})

    assert (checkpoint.run() / "chat_template.jinja").read_text() == "A"


def test_weights_linked_within_the_directory_are_read(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "blobs").mkdir()
    (checkpoint.path / "model.safetensors").rename(checkpoint.path / "blobs" / "abc")
    (checkpoint.path / "model.safetensors").symlink_to("blobs/abc")

    verify(checkpoint.run())


def test_the_same_model_is_imported_to_the_same_place(checkpoint: Checkpoint) -> None:
    assert checkpoint.run() == checkpoint.run()


@pytest.mark.slow
def test_what_transformers_saves_is_imported_exactly(checkpoint: Checkpoint) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    (checkpoint.path / "model.safetensors").unlink()
    model.save_pretrained(checkpoint.path, max_shard_size="10KB")
    assert (checkpoint.path / "model.safetensors.index.json").exists()

    artifact = checkpoint.run("bfloat16")

    for name, weight in model.state_dict().items():
        ours = from_bfloat16(_stored_bits(artifact, name))
        assert np.array_equal(ours, weight.float().numpy()), name
