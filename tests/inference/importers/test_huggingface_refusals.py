"""A Hugging Face directory that is broken, foreign or unsafe is refused whole, by file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.importers.checkpoint import EMBEDDING
from tests.inference.importers.small_checkpoint import (
    CONFIG,
    Checkpoint,
    make_weights,
    write_checkpoint,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A valid directory."""
    return write_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named", "code"),
    [
        ({"architectures": ["QwenForCausalLM"]}, "architectures", "unsupported_model"),
        ({"architectures": None}, "architectures", "unsupported_model"),
        ({"hidden_act": "gelu"}, "hidden_act", "unsupported_model"),
        ({"attention_bias": True}, "attention_bias", "unsupported_model"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "unsupported_model"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type: 'yarn'", "unsupported_model"),
        ({"rope_scaling": "linear"}, "rope_scaling", "unsupported_model"),
        ({"rope_scaling": {"type": "linear"}}, "factor", "broken_artifact"),
        ({"auto_map": {"AutoModel": "m.M"}}, "auto_map", "unsafe_artifact"),
        ({"hidden_size": None}, "hidden_size", "broken_artifact"),
        ({"hidden_size": "16"}, "hidden_size", "broken_artifact"),
        ({"hidden_size": True}, "hidden_size", "broken_artifact"),
        ({"num_attention_heads": 0}, "num_heads", "broken_artifact"),
        ({"num_hidden_layers": 10**9}, "num_layers", "broken_artifact"),
        ({"max_position_embeddings": 10**12}, "context_length", "broken_artifact"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "broken_artifact"),
        ({"vocab_size": 300}, EMBEDDING, "broken_artifact"),
        ({"num_hidden_layers": 3}, "model.layers.2", "broken_artifact"),
        ({"num_hidden_layers": 1}, "model.layers.1", "unsupported_model"),
        ({"eos_token_id": None}, "eos_token_id", "broken_artifact"),
        ({"eos_token_id": 258}, "eos_token_id", "broken_artifact"),
        ({"eos_token_id": "x"}, "eos_token_id", "broken_artifact"),
        ({"bos_token_id": -1}, "bos_token_id", "broken_artifact"),
    ],
)
def test_a_configuration_that_is_not_ours_is_refused_by_its_field(
    checkpoint: Checkpoint, changes: dict[str, Any], named: str, code: str
) -> None:
    checkpoint.configure(**changes)

    refusal = checkpoint.refusal()

    assert named in str(refusal)
    assert refusal.code == code


def test_an_infinite_number_in_the_configuration_is_refused(checkpoint: Checkpoint) -> None:
    text = json.dumps(CONFIG).replace("20000.0", "1e999")
    (checkpoint.path / "config.json").write_text(text)

    assert "rope_theta" in str(checkpoint.refusal())


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"temperature": 9.0}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": "0.9"}, "top_p"),
    ],
)
def test_generation_defaults_out_of_range_are_refused(
    checkpoint: Checkpoint, generation: dict[str, Any], named: str
) -> None:
    checkpoint.write_json("generation_config.json", generation)

    assert f"generation_config.json: {named}" in str(checkpoint.refusal())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(checkpoint: Checkpoint, value: float) -> None:
    weights = make_weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    checkpoint.save(weights)

    assert "model.layers.1.mlp.up_proj.weight: it holds NaN" in str(checkpoint.refusal())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_weight_is_named(checkpoint: Checkpoint, name: str) -> None:
    weights = make_weights()
    del weights[name]
    checkpoint.save(weights)

    assert f"{name}: missing" in str(checkpoint.refusal())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_llama.py"])
def test_a_model_beside_pickles_or_code_is_refused_whole(checkpoint: Checkpoint, name: str) -> None:
    (checkpoint.path / name).write_bytes(b"")

    assert name in str(checkpoint.refusal())


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_request_for_remote_code_is_refused_in_every_file(
    checkpoint: Checkpoint, name: str
) -> None:
    checkpoint.write_json(name, {"auto_map": {"AutoTokenizer": ["t.T", None]}})

    assert checkpoint.refusal().code == "unsafe_artifact"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint: Checkpoint, name: str) -> None:
    (checkpoint.path / name).unlink()

    assert name in str(checkpoint.refusal())
