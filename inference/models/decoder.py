"""Decoder-only transformers of the families we run ourselves, built from an artifact by its manifest.

A family is an entry of ``weights.FAMILIES``: how its tensors are named. Everything else is the shape in ``ModelConfig``.
The same code runs on ``cpu`` and ``cuda``, without a graph and without gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from inference.artifact import Manifest
from inference.config import ModelConfig
from inference.models.attention import (
    AttentionBatch,
    AttentionShape,
    attend,
    clear_blocks,
    write_kv,
)
from inference.models.layers import (
    MIN_ROWS,
    Linear,
    RmsNorm,
    RotaryEmbedding,
    pair_neighbours,
    rotate_,
)
from inference.models.numerics import compute_dtype, describe_torch
from inference.models.step import Step
from inference.models.weights import Family, WeightFile, family_of

logger = logging.getLogger(__name__)


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
        self._dtype = weights.dtype
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
        with WeightFile(artifact) as file:
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

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """As ``AttentionShape`` describes it."""
        return torch_block_shape(self.model, block_size)

    def describe_numerics(self) -> dict[str, str]:
        """Facts that decide how a sum is rounded."""
        return describe_torch(self._dtype, self.device)

    @torch.inference_mode()
    def compute(self, step: Step, cache: Tensor) -> Tensor:
        """As ``StepModel.compute``."""
        model = self.model
        shape = AttentionShape(
            model.num_heads, model.num_kv_heads, model.head_dim, block_size=cache.shape[-2]
        )
        batch = AttentionBatch.from_spans(shape, step.spans, self.device)
        clear_blocks(cache, batch.first_blocks)
        return self.forward(
            _padded(step.token_ids, self.device),
            _padded(step.positions(), self.device),
            _padded(step.logit_rows, self.device),
            batch,
            cache,
        )[: len(step.logit_rows)]

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


def _padded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers with zeros up to ``MIN_ROWS``; nothing stays nothing."""
    values = torch.tensor(numbers, dtype=torch.int64)
    missing = max(MIN_ROWS - values.shape[0], 0) if values.shape[0] else 0
    return functional.pad(values, (0, missing)).to(device)


def _mlp(layer: _Layer, hidden: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class _Weights:
    """Layers from a file's tensors, rounded to ``dtype`` and ready for ``device``."""

    file: WeightFile
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def family(self) -> Family:
        return family_of(self.model)

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


def torch_block_shape(model: ModelConfig, block_size: int) -> tuple[int, ...]:
    """Shape of a KV block of one layer: keys and values, ``[2, num_kv_heads, block_size, head_dim]``."""
    return (2, model.num_kv_heads, block_size, model.head_dim)
