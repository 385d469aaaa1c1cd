"""Tiny random models with a tokenizer of bytes; it needs neither torch nor anything else that a server has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from inference.artifact import Contents, NewTensor, write_artifact
from inference.config import ModelConfig

END_OF_TEXT = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Weight = npt.NDArray[np.float32]


def write_tiny(
    root: Path,
    *,
    omit: str = "",
    poisoned_token: int | None = None,
    generation_defaults: Mapping[str, Any] | None = None,
    **shape: Any,
) -> Path:
    """The artifact below ``root`` of a random model, its tokenizer one token a byte; ``shape`` overrides its config.

    ``omit`` leaves a tensor out; ``poisoned_token`` has an embedding that is not a number.
    """
    model = _tiny_model(**shape)
    weights = dict(_random_weights(model))
    weights.pop(omit, None)
    if poisoned_token is not None:
        weights["model.embed_tokens.weight"][poisoned_token] = np.nan
    return write_artifact(
        root,
        Contents(
            model=model,
            tensors=[_new_tensor(*each) for each in weights.items()],
            tokenizer=_byte_tokenizer().to_str(),
            chat_template=CHAT_TEMPLATE,
            quantization="none",
            stored_dtype="float32",
            num_parameters=sum(weight.size for weight in weights.values()),
            generation_defaults=generation_defaults or {},
        ),
    )


def _tiny_model(**shape: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 12,
        "context_length": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "eos_token_ids": (257,),
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**{**fields, **shape})


def _new_tensor(name: str, weight: Weight) -> NewTensor:
    return NewTensor(name, "F32", weight.shape, lambda: [weight])


def _random_weights(model: ModelConfig) -> Iterator[tuple[str, Weight]]:
    generator = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Weight:
        values: Weight = generator.standard_normal((rows, columns), dtype=np.float32)
        return values / np.float32(columns**0.5)

    def scale() -> Weight:
        values: Weight = generator.standard_normal(model.hidden_size, dtype=np.float32)
        return np.float32(1) + values / np.float32(10)

    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield "model.embed_tokens.weight", matrix(model.vocab_size, hidden)
    yield "model.norm.weight", scale()
    if not model.tie_word_embeddings:
        yield "lm_head.weight", matrix(model.vocab_size, hidden)
    for index in range(model.num_layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", scale()
        yield prefix + "post_attention_layernorm.weight", scale()
        yield prefix + "self_attn.q_proj.weight", matrix(queries, hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(keys, hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(keys, hidden)
        yield prefix + "self_attn.o_proj.weight", matrix(hidden, queries)
        yield prefix + "mlp.gate_proj.weight", matrix(inner, hidden)
        yield prefix + "mlp.up_proj.weight", matrix(inner, hidden)
        yield prefix + "mlp.down_proj.weight", matrix(hidden, inner)


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", END_OF_TEXT]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer
