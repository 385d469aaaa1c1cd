"""A small Hugging Face directory for tests of its import."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from inference.artifact import BrokenArtifact
from inference.importers.checkpoint import EMBEDDING, HEAD
from inference.importers.huggingface import import_huggingface

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 20_000.0,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
IM_END = 257
Weights = dict[str, npt.NDArray[Any]]


def make_weights() -> Weights:
    """Random weights under Hugging Face's names; the same at every call."""
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (258, 16),
        "model.norm.weight": (16,),
        HEAD: (258, 16),
    }
    for index in range(2):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (16,),
            prefix + "self_attn.q_proj.weight": (16, 16),
            prefix + "self_attn.k_proj.weight": (8, 16),
            prefix + "self_attn.v_proj.weight": (8, 16),
            prefix + "self_attn.o_proj.weight": (16, 16),
            prefix + "post_attention_layernorm.weight": (16,),
            prefix + "mlp.gate_proj.weight": (24, 16),
            prefix + "mlp.up_proj.weight": (24, 16),
            prefix + "mlp.down_proj.weight": (16, 24),
        }
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<|im_end|>")])
    return tokenizer


@dataclass
class Checkpoint:
    """A model directory to change before it is imported."""

    path: Path
    root: Path

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file."""
        (self.path / name).write_text(json.dumps(value))

    def configure(self, **changes: Any) -> None:
        """Write ``config.json`` with changes; None removes a field."""
        config = CONFIG | changes
        self.write_json("config.json", {k: v for k, v in config.items() if v is not None})

    def save(self, weights: Weights, name: str = "model.safetensors") -> None:
        """Write a weights file."""
        save_file(weights, self.path / name, metadata={"format": "pt"})

    def run(self, dtype: str = "float32") -> Path:
        """Import it."""
        return import_huggingface(self.path, self.root, dtype=dtype)

    def refusal(self) -> BrokenArtifact:
        """Why the import is refused; it leaves nothing behind."""
        with pytest.raises(BrokenArtifact) as caught:
            self.run()
        assert not list(self.root.glob("*"))
        return caught.value


def write_checkpoint(directory: Path) -> Checkpoint:
    """A valid directory of a model of a few thousand weights."""
    (directory / "model").mkdir()
    checkpoint = Checkpoint(directory / "model", directory / "root")
    checkpoint.configure()
    checkpoint.save(make_weights())
    _tokenizer().save(str(checkpoint.path / "tokenizer.json"))
    return checkpoint
