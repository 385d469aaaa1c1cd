"""Hugging Face directories of a tiny model: a good one, and one for each way in which models arrive broken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 20_000.0,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 256,
    "tie_word_embeddings": True,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Weights = dict[str, npt.NDArray[np.float32]]


def write_good(path: Path, **changes: Any) -> Path:
    """A directory that can be registered and served; ``changes`` are made to its ``config.json``."""
    config = CONFIG | changes
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    _make_tokenizer().save(str(path / "tokenizer.json"))
    _save(path, _make_weights(config))
    return path


def write_chatty(path: Path, **changes: Any) -> Path:
    """A good one with a chat template."""
    write_good(path, **changes)
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    )
    return path


def write_with_corrupt_shard(path: Path) -> Path:
    """The second shard ends in the middle of a tensor, as after an interrupted download."""
    write_good(path)
    shard = path / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    return path


def write_without_tokenizer(path: Path) -> Path:
    """The weights alone."""
    write_good(path)
    (path / "tokenizer.json").unlink()
    return path


def write_with_nan(path: Path) -> Path:
    """One weight of a projection is not a number."""
    return _write_with_weight(path, float("nan"))


def write_overflowing(path: Path) -> Path:
    """One weight is so large that every logit overflows, although each weight is a number."""
    return _write_with_weight(path, 3e38)


def write_long_context(path: Path) -> Path:
    """Good and small, but the keys and values of one long sequence are more than any machine holds."""
    return write_good(
        path,
        hidden_size=64,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=64,
        max_position_embeddings=2**24,
    )


def _write_with_weight(path: Path, value: float) -> Path:
    write_good(path)
    weights = _make_weights(CONFIG)
    weights["model.layers.0.mlp.down_proj.weight"][:] = value
    _save(path, weights)
    return path


def _save(path: Path, weights: Weights) -> None:
    names = sorted(weights)
    parts = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    for shard, members in parts.items():
        save_file(
            {name: weights[name] for name in members}, path / shard, metadata={"format": "pt"}
        )
    index = {name: shard for shard, members in parts.items() for name in members}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text)


def _make_weights(config: Mapping[str, Any]) -> Weights:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<|im_end|>")])
    return tokenizer
