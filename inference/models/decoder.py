"""Decoder-only transformers of the families we run ourselves, built from an artifact by its manifest.

A family is an entry of ``FAMILIES``: how its tensors are named. Everything else is the shape in ``ModelConfig``. The
same code runs on ``cpu`` and ``cuda``, without a graph and without gradients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from inference.artifact import WEIGHTS, BrokenArtifact, Manifest
from inference.config import InvalidConfig, ModelConfig
from inference.models.attention import AttentionBatch, attend, write_kv
from inference.models.layers import Linear, RmsNorm, RotaryEmbedding, pair_neighbours, rotate_
from inference.models.numerics import compute_dtype
from inference.quantization import SCHEMES, Scheme

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family names its tensors; ``layer`` takes the layer's number and precedes the names below it."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm.weight"
    query: str = "self_attn.q_proj.weight"
    key: str = "self_attn.k_proj.weight"
    value: str = "self_attn.v_proj.weight"
    attention_output: str = "self_attn.o_proj.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    gate: str = "mlp.gate_proj.weight"
    up: str = "mlp.up_proj.weight"
    down: str = "mlp.down_proj.weight"


FAMILIES: Mapping[str, Family] = {"llama": Family()}


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: RmsNorm
    query_key_value: Linear
    attention_output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Decoder:
    """A model of Llama's shape: RMS norms, rotary embedding, grouped-query attention, gated MLP."""

    def __init__(self, weights: _Weights, *, num_positions: int) -> None:
        model = weights.model
        self.model = model
        self.device = weights.device
        family = weights.family
        self._final_norm = weights.norm(family.final_norm)
        self._embed: Callable[[Tensor], Tensor]
        if model.tie_word_embeddings:
            self._head = weights.linear(family.embedding, model.vocab_size, model.hidden_size)
            self._embed = self._head.weight_rows
        else:
            self._head = weights.linear(family.head, model.vocab_size, model.hidden_size)
            self._embed = weights.embedding().__getitem__
        self._layers = [weights.layer(index) for index in range(model.num_layers)]
        self._rotary = RotaryEmbedding(model, num_positions=num_positions, device=self.device)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        artifact: Path,
        manifest: Manifest,
        *,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """The model of ``artifact``, for sequences of up to ``num_positions`` tokens.

        Besides the finished model, memory holds one fused weight at a time.

        Raises:
            InvalidConfig: the family is not one of ``FAMILIES``.
            BrokenArtifact: a tensor is missing, has the wrong shape, or belongs to nothing.
        """
        with _WeightFile(artifact / WEIGHTS) as file:
            decoder = cls(
                _Weights(file, manifest.model, dtype, device), num_positions=num_positions
            )
            file.check_all_read()
        logger.info(
            "weights loaded artifact=%s family=%s kept_as=%s computed_in=%s device=%s stored=%s",
            artifact.name,
            manifest.model.family,
            dtype,
            compute_dtype(dtype, device),
            device,
            file.describe(),
        )
        return decoder

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
    ) -> Tensor:
        """Compute a step's tokens, leave their keys and values in ``cache``, and answer some of them.

        ``token_ids`` and ``positions`` are ``[num_rows]``: the tokens of ``batch``, then padding up to ``MIN_ROWS``.
        ``cache`` is ``[num_layers, ...]`` as ``AttentionShape`` describes it.

        Returns:
            Float32 logits ``[num_logit_rows, vocab_size]`` of the rows ``logit_rows``.
        """
        hidden = self._embed(token_ids)  # [num_rows, hidden_size]
        turns = self._rotary.turns(positions)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            hidden += self._attention(layer, hidden, turns, batch, layer_cache)
            hidden += _mlp(layer, hidden)
        return self._head(self._final_norm(hidden[logit_rows])).float()

    def _attention(
        self,
        layer: _Layer,
        hidden: Tensor,
        turns: Tensor,
        batch: AttentionBatch,
        layer_cache: Tensor,
    ) -> Tensor:
        model = self.model
        fused = layer.query_key_value(layer.attention_norm(hidden)).float()
        heads = fused.view(fused.shape[0], -1, model.head_dim)  # queries, keys, values
        rotate_(heads[:, : model.num_heads + model.num_kv_heads], turns)
        write_kv(layer_cache, heads[: batch.num_tokens, model.num_heads :], batch)
        answers = attend(layer_cache, heads[:, : model.num_heads], batch)
        return layer.attention_output(answers.to(hidden.dtype))


def _mlp(layer: _Layer, hidden: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up))


class _WeightFile:
    """The tensors of a safetensors file, each read once; quantised ones come back whole, in float32."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        self._unread = set(self._file.keys())
        self._num_read: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, traceback)

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name``, which must have ``shape``.

        Raises:
            BrokenArtifact: it is missing, was read before, or has another shape.
        """
        scheme = next((each for each in SCHEMES.values() if self._holds(each, name)), None)
        if scheme is not None:
            weight = self._dequantize(scheme, name)
        elif name in self._unread:
            weight = self._take(name)
        else:
            raise self._broken(name, "the tensor is missing.")
        if tuple(weight.shape) != shape:
            raise self._broken(name, f"its shape is {tuple(weight.shape)}, the model's is {shape}.")
        self._num_read[scheme.name if scheme else str(weight.dtype)] += 1
        return weight

    def check_all_read(self) -> None:
        """Raises BrokenArtifact if a tensor is left over: whoever made the file meant something by it."""
        if self._unread:
            names = sorted(self._unread)
            raise self._broken(
                names[0], f"{len(names)} tensors belong to no part of the model, this the first."
            )

    def describe(self) -> str:
        """How many tensors were stored how; quantised ones were dequantised on the way."""
        return ", ".join(
            f"{count} {kind}{' dequantised' if kind in SCHEMES else ''}"
            for kind, count in sorted(self._num_read.items())
        )

    def _holds(self, scheme: Scheme, name: str) -> bool:
        return self._unread.issuperset(scheme.tensor_names(name))

    def _dequantize(self, scheme: Scheme, name: str) -> Tensor:
        parts = {part: self._take(part).numpy() for part in scheme.tensor_names(name)}
        return torch.from_numpy(scheme.read(name, parts))

    def _take(self, name: str) -> Tensor:
        self._unread.remove(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def _broken(self, name: str, problem: str) -> BrokenArtifact:
        return BrokenArtifact(
            str(self._path), name, problem, "Import the model again, with its own config."
        )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BrokenArtifact(str(path), "", f"{error}.", "Import the model again.") from error


@dataclass(frozen=True, slots=True)
class _Weights:
    """Layers from a file's tensors, rounded to ``dtype`` and ready for ``device``."""

    file: _WeightFile
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def family(self) -> Family:
        if self.model.family not in FAMILIES:
            raise InvalidConfig(
                f"family={self.model.family!r} is not one we run; known are {', '.join(FAMILIES)}."
            )
        return FAMILIES[self.model.family]

    def layer(self, index: int) -> _Layer:
        family, model = self.family, self.model
        prefix = family.layer.format(index)
        num_queries, num_keys = (
            heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads)
        )
        hidden, inner = model.hidden_size, model.intermediate_size
        query = self._read(prefix + family.query, num_queries, hidden)
        key = self._read(prefix + family.key, num_keys, hidden)
        fused = torch.cat(
            [
                pair_neighbours(query, model.head_dim),
                pair_neighbours(key, model.head_dim),
                self._read(prefix + family.value, num_keys, hidden),
            ]
        )
        gate_up = [self._read(prefix + name, inner, hidden) for name in (family.gate, family.up)]
        return _Layer(
            attention_norm=self.norm(prefix + family.attention_norm),
            query_key_value=self._linear(fused),
            attention_output=self.linear(prefix + family.attention_output, hidden, num_queries),
            mlp_norm=self.norm(prefix + family.mlp_norm),
            gate_up=self._linear(torch.cat(gate_up)),
            down=self.linear(prefix + family.down, hidden, inner),
        )

    def linear(self, name: str, num_outputs: int, num_inputs: int) -> Linear:
        return self._linear(self._read(name, num_outputs, num_inputs))

    def norm(self, name: str) -> RmsNorm:
        scale = self._read(name, self.model.hidden_size)
        return RmsNorm(scale, eps=self.model.rms_norm_eps, dtype=self._computed, device=self.device)

    def embedding(self) -> Tensor:
        """``[vocab_size, hidden_size]``."""
        table = self._read(self.family.embedding, self.model.vocab_size, self.model.hidden_size)
        return table.to(device=self.device, dtype=self._computed)

    @property
    def _computed(self) -> torch.dtype:
        return compute_dtype(self.dtype, self.device)

    def _linear(self, weight: Tensor) -> Linear:
        return Linear(weight, dtype=self._computed, device=self.device)

    def _read(self, name: str, *shape: int) -> Tensor:
        return self.file.read(name, *shape).to(self.dtype)
