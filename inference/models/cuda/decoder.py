"""The decoder of a CUDA device: a ``StepModel`` whose decode steps come from graphs and whose other steps are eager.

Weights and activations are of one dtype, int4 matrices stay int4 where the kernel takes them, rotary embedding and logits are
float32. On ``cpu`` the same code runs without graphs.

What is guaranteed: the same step on the same device gives the same answer, with and without graphs if the numbers of rows
are equal. What is not: matrix libraries choose their kernels by the number of rows, so a row's last bits depend on the
bucket that its batch-mates fill, and on how its prompt was cut. ``describe_numerics`` says ``batch_invariant: no``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from inference.artifact import Manifest
from inference.config import ModelConfig
from inference.models.attention import AttentionShape, clear_blocks
from inference.models.cuda.attention import Attend, Attention, DecodeAttention
from inference.models.cuda.batch import FIXED_COLUMNS, bucket_sizes, first_blocks, slots_of
from inference.models.cuda.device import describe_device, settle_arithmetic
from inference.models.cuda.flash_infer import choose_attention
from inference.models.cuda.graphs import DecodeGraphs
from inference.models.cuda.linear import Linear, LinearMaker, widen, with_neighbours
from inference.models.decoder import torch_block_shape
from inference.models.layers import RmsNorm, RotaryEmbedding, rotate_
from inference.models.native import WeightSource
from inference.models.step import Step
from inference.models.weights import StoredWeight, WeightFile, family_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """What is decided at start: sizes of the cache and of batches, numbers, and the device.

    ``captures`` false computes every step eagerly, decode steps in the same buckets.
    """

    block_size: int
    num_positions: int
    max_num_seqs: int
    dtype: torch.dtype
    device: torch.device
    captures: bool = True


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: RmsNorm
    query_key_value: Linear
    attention_output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step: their tokens, how they turn, where they write, and how they attend.

    ``padding`` marks rows that stand for no token. They are zero from the embedding on, so that what they write is zero:
    block 0, which everybody's short table ends in, stays clean.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attend: Attend
    padding: Tensor | None = None


class CudaDecoder:
    """A model of Llama's shape: RMS norms, rotary embedding, grouped-query attention, gated MLP."""

    @torch.inference_mode()
    def __init__(self, source: WeightSource, model: ModelConfig, options: DecoderOptions) -> None:
        self.maker = LinearMaker(options.dtype, options.device)
        weights = _Weights(source, model, self.maker)
        settle_arithmetic(options.device)
        self.model = model
        self._options = options
        self._shape = AttentionShape(
            model.num_heads, model.num_kv_heads, model.head_dim, options.block_size
        )
        self._embedding, self._head = weights.ends()
        self._layers = [weights.layer(index) for index in range(model.num_layers)]
        self._final_norm = weights.norm(weights.family.final_norm)
        self._rotary = RotaryEmbedding(
            model, num_positions=options.num_positions, device=options.device
        )
        self.attention: Attention = choose_attention(
            self._shape,
            dtype=options.dtype,
            device=options.device,
            max_blocks=-(-options.num_positions // options.block_size),
        )
        self.graphs = DecodeGraphs(
            self._compute_packed,
            self.attention,
            sizes=bucket_sizes(options.max_num_seqs),
            device=options.device,
            captures=options.captures and options.device.type == "cuda",
        )

    @classmethod
    def load(cls, artifact: Path, manifest: Manifest, options: DecoderOptions) -> Self:
        """The model of ``artifact``.

        Besides the finished model, memory holds one fused weight at a time.

        Raises:
            InvalidConfig: the family is not one of ``FAMILIES``.
            BrokenArtifact: a tensor is missing, has the wrong shape, or belongs to nothing.
        """
        started_at = time.monotonic()
        with WeightFile(artifact) as file:
            decoder = cls(file, manifest.model, options)
            file.check_all_read()
        maker = decoder.maker
        logger.info(
            "weights on device artifact=%s facts=%s stored=%s kept_int4=%d widened=%d seconds=%.2f",
            *(artifact.name, decoder.describe_numerics(), file.describe()),
            *(maker.num_int4, maker.num_widened, time.monotonic() - started_at),
        )
        return decoder

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """As ``AttentionShape`` describes it, which is FlashInfer's layout too."""
        return torch_block_shape(self.model, block_size)

    def describe_numerics(self) -> dict[str, str]:
        """Facts that decide how a sum is rounded; buckets are among them, since they are numbers of rows."""
        options = self._options
        return {
            "kept_as": str(options.dtype),
            "computed_in": str(options.dtype),
            "kernel": f"cuda {self.attention.name}" + (" int4" if self.maker.num_int4 else ""),
            "buckets": ",".join(map(str, bucket_sizes(options.max_num_seqs))),
            "batch_invariant": "no",
            **describe_device(options.device),
        }

    @torch.inference_mode()
    def compute(self, step: Step, cache: Tensor) -> Tensor:
        """As ``StepModel.compute``, but a row's last bits may depend on how many others there are."""
        block_size = self._shape.block_size
        slots = torch.cat([torch.from_numpy(slots_of(span, block_size)) for span in step.spans])
        new_blocks = torch.from_numpy(first_blocks(slots.numpy(), block_size))
        if new_blocks.numel():
            clear_blocks(cache, new_blocks.to(self._options.device))
        if self.graphs.takes(step):
            logits = self.graphs.run(step, cache, block_size)
            # Not the graph's own buffer: the next replay would overwrite what the caller has.
            return logits[self._indices(step.logit_rows)]
        return self._compute_eagerly(step, slots, cache)

    def _compute_eagerly(self, step: Step, slots: Tensor, cache: Tensor) -> Tensor:
        rows = _Rows(
            token_ids=self._indices(step.token_ids),
            positions=self._indices(step.positions()),
            slots=slots.to(self._options.device),
            attend=self.attention.plan(step.spans),
        )
        hidden = self._forward(rows, cache)
        return self._logits(hidden[self._indices(step.logit_rows)])

    def _compute_packed(self, packed: Tensor, attention: DecodeAttention, cache: Tensor) -> Tensor:
        """A decode step from one buffer; nothing here may ask the host."""
        token_ids, positions, slots = packed[:, :FIXED_COLUMNS].unbind(1)
        rows = _Rows(
            token_ids=token_ids,
            positions=positions.clamp(min=0),
            slots=slots,
            attend=attention.bind(positions, packed[:, FIXED_COLUMNS:]),
            padding=(positions < 0)[:, None],
        )
        return self._logits(self._forward(rows, cache))

    def _forward(self, rows: _Rows, cache: Tensor) -> Tensor:
        """The last layer's answer for every row, ``[num_rows, hidden_size]``."""
        hidden = self._embedding[rows.token_ids]
        if rows.padding is not None:
            hidden.masked_fill_(rows.padding, 0.0)
        turns = self._rotary.turns(rows.positions)
        cache_rows = self._cache_rows(rows.slots)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            queries = self._project(layer, hidden, turns, cache_rows, layer_cache)
            hidden += layer.attention_output(rows.attend(layer_cache, queries))
            hidden += _mlp(layer, hidden)
        return hidden

    def _project(
        self,
        layer: _Layer,
        hidden: Tensor,
        turns: Tensor,
        cache_rows: Tensor,
        layer_cache: Tensor,
    ) -> Tensor:
        """Write keys and values of all rows; their queries ``[num_rows, num_heads, head_dim]``."""
        model = self.model
        fused = layer.query_key_value(layer.attention_norm(hidden))
        heads = fused.float().view(fused.shape[0], -1, model.head_dim)  # queries, keys, values
        rotate_(heads[:, : model.num_heads + model.num_kv_heads], turns)
        heads = heads.to(fused.dtype)
        keys_values = heads[:, model.num_heads :].reshape(-1, model.head_dim)
        layer_cache.view(-1, model.head_dim).index_copy_(0, cache_rows, keys_values)
        return heads[:, : model.num_heads]

    def _cache_rows(self, slots: Tensor) -> Tensor:
        """Rows of a layer's cache seen as ``[..., head_dim]``, for keys and then values of each slot's token."""
        shape = self._shape
        heads = torch.arange(2 * shape.num_kv_heads, device=slots.device)
        blocks = torch.div(slots, shape.block_size, rounding_mode="floor")[:, None]
        rows = (blocks * heads.numel() + heads) * shape.block_size
        return (rows + (slots % shape.block_size)[:, None]).flatten()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._final_norm(hidden)).float()

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._options.device)


def _mlp(layer: _Layer, hidden: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up))


class _Weights:
    """Parts of a decoder from the tensors of its source."""

    def __init__(self, source: WeightSource, model: ModelConfig, maker: LinearMaker) -> None:
        self.source = source
        self.model = model
        self.maker = maker
        self.family = family_of(model)

    def ends(self) -> tuple[Tensor, Linear]:
        """The table of embeddings, which is dense, and the head."""
        model = self.model
        table = self._read(self.family.embedding, model.vocab_size, model.hidden_size)
        if model.tie_word_embeddings:
            head = self.maker.dense([table])
            return head.weight, head
        stored = self._read(self.family.head, model.vocab_size, model.hidden_size)
        return self.maker.to_device(widen(table)), self.maker.make([stored])

    def layer(self, index: int) -> _Layer:
        model, family = self.model, self.family
        prefix = family.layer.format(index)
        hidden, inner = model.hidden_size, model.intermediate_size
        queries, keys = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
        query_key = [
            with_neighbours(self._read(prefix + name, rows, hidden), model.head_dim)
            for name, rows in ((family.query, queries), (family.key, keys))
        ]
        value = self._read(prefix + family.value, keys, hidden)
        gate_up = [self._read(prefix + name, inner, hidden) for name in (family.gate, family.up)]
        output = self._read(prefix + family.attention_output, hidden, queries)
        return _Layer(
            attention_norm=self.norm(prefix + family.attention_norm),
            query_key_value=self.maker.make([*query_key, value]),
            attention_output=self.maker.make([output]),
            mlp_norm=self.norm(prefix + family.mlp_norm),
            gate_up=self.maker.make(gate_up),
            down=self.maker.make([self._read(prefix + family.down, hidden, inner)]),
        )

    def norm(self, name: str) -> RmsNorm:
        scale = self.source.read(name, self.model.hidden_size)
        return RmsNorm(
            scale,
            eps=self.model.rms_norm_eps,
            dtype=self.maker.dtype,
            device=self.maker.device,
        )

    def _read(self, name: str, rows: int, columns: int) -> StoredWeight:
        return self.source.read_stored(name, rows, columns)
