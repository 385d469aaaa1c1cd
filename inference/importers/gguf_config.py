"""The shape of a Llama model, from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "LLM".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.artifact import BrokenArtifact
from inference.config import InvalidConfig, ModelConfig, RopeScaling
from inference.importers.checkpoint import read_rows
from inference.importers.gguf_file import GgufHeader, GgufTensor

ROPE_FACTORS = "rope_freqs.weight"


def read_config(path: Path, header: GgufHeader) -> ModelConfig:
    """The shape of the model, from the metadata and the embedding's rows.

    Raises:
        BrokenArtifact: another architecture, a missing or impossible value, or a feature that is not supported.
    """
    metadata = _Metadata(path, header.metadata)
    if (architecture := metadata.get("general.architecture", str)) != "llama":
        raise metadata.refuse(
            "general.architecture", f"{architecture!r} is not supported, only 'llama'."
        )
    if metadata.get("llama.expert_count", int, 0):
        raise metadata.refuse("llama.expert_count", "mixtures of experts are not supported.")
    num_heads = metadata.get("llama.attention.head_count", int)
    hidden_size = metadata.get("llama.embedding_length", int)
    head_dim = metadata.get("llama.attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if (size := metadata.get(key, int, head_dim)) != head_dim:
            raise metadata.refuse(key, f"{size} differs from the head size {head_dim}.")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.refuse("token_embd.weight", "the tensor is missing.")
    try:
        return ModelConfig(
            family="llama",
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=metadata.get("llama.feed_forward_length", int),
            num_layers=metadata.get("llama.block_count", int),
            num_heads=num_heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            context_length=metadata.get("llama.context_length", int),
            rms_norm_eps=metadata.positive("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=metadata.positive("llama.rope.freq_base", 10_000.0),
            eos_token_ids=_eos_ids(metadata),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id", int, None),
            tie_word_embeddings="output.weight" not in header.tensors,
            rope_scaling=_rope_scaling(metadata, header, head_dim),
        )
    except (InvalidConfig, ZeroDivisionError) as error:
        raise metadata.refuse("llama", str(error)) from error


def read_chat_template(path: Path, header: GgufHeader) -> str | None:
    """The template for chats, None where the model has none.

    Raises:
        BrokenArtifact: it is not a text.
    """
    template: str = _Metadata(path, header.metadata).get("tokenizer.chat_template", str, "")
    return template or None


class _Metadata:
    """Typed reads from the metadata of one file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str, kind: type, *default: Any) -> Any:
        """The value under ``key``; a missing one is an error unless there is a default."""
        if key not in self._values and default:
            return default[0]
        value = self._values.get(key)
        if type(value) is not kind:
            raise BrokenArtifact(
                self.path.name,
                key,
                f"{str(value)[:80]!r} is missing or not of type {kind.__name__}.",
                "Export the file again with llama.cpp's converter.",
            )
        return value

    def positive(self, key: str, *default: float) -> float:
        """The finite float above 0 under ``key``, in the fewest digits that name this float32.

        So 1e-05 does not become 9.999999747378752e-06, and equals what Hugging Face's files say.
        """
        value = self.get(key, float, *default)
        if not 0 < value < math.inf:
            raise self.refuse(key, f"{value} is not a positive number.")
        return float(str(np.float32(value)))

    def refuse(self, key: str, problem: str) -> BrokenArtifact:
        return BrokenArtifact(
            self.path.name, key, problem, "Import a plain Llama model.", code="unsupported_model"
        )


def _eos_ids(metadata: _Metadata) -> tuple[int, ...]:
    keys = ("eos", "eot", "eom")
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id", int, None) for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _rope_scaling(metadata: _Metadata, header: GgufHeader, head_dim: int) -> RopeScaling | None:
    kind = metadata.get("llama.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise metadata.refuse("llama.rope.scaling.type", f"{kind!r} is not supported.")
    if ROPE_FACTORS in header.tensors:
        return _llama3_scaling(metadata, header.tensors[ROPE_FACTORS], head_dim)
    if kind == "linear":
        return RopeScaling("linear", metadata.positive("llama.rope.scaling.factor"))
    return None


def _llama3_scaling(metadata: _Metadata, tensor: GgufTensor, head_dim: int) -> RopeScaling:
    """The scaling whose factors, one for each frequency, the converter has written into ``tensor``.

    Only the published constants (low 1, high 4, 8,192 tokens) are recognised; the factor is the largest one.
    """
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise metadata.refuse(ROPE_FACTORS, f"{tensor.type.name} {tensor.shape} is not supported.")
    (raw,) = read_rows(metadata.path, tensor.start, 1, tensor.row_bytes)
    found = raw.view("<f4")[0]
    theta = metadata.positive("llama.rope.freq_base", 10_000.0)
    scaling = RopeScaling("llama3", float(str(found.max())))
    if not np.allclose(found, llama3_factors(scaling, theta, head_dim), rtol=1e-4, atol=0):
        raise metadata.refuse(ROPE_FACTORS, "its factors are not those of Llama 3.")
    return scaling


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """By how much each of the ``head_dim / 2`` rotary frequencies is divided.

    Source: ``_compute_llama3_parameters`` in transformers' ``modeling_rope_utils.py``.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = (
        scaling.original_context_length * frequencies / (2 * np.pi)
    )  # within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
