"""The decoder whose step is one native call: weights packed once, integers multiplied as integers.

A quantised weight is kept as it is stored, whatever ``dtype`` says; other matrices are rounded to ``dtype``, which is
also what the cache holds. Norms, sums and logits are float32. A row's result depends neither on the rows beside it nor
on the number of threads.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference.artifact import Manifest
from inference.config import ModelConfig
from inference.kernels import loader
from inference.kernels.loader import Format, Library, Norm, Role
from inference.models.layers import rotary_frequencies
from inference.models.step import Step
from inference.models.weights import Family, StoredWeight, WeightFile, family_of

logger = logging.getLogger(__name__)

FORMATS: Mapping[torch.dtype, Format] = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
}
_INTEGERS: Mapping[str, Format] = {"int4": Format.INT4, "int8": Format.INT8}
_LANES = 16


_SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
)


@dataclass(frozen=True, slots=True)
class _Named:
    """A matrix of the model: what it is for, and what its artifact calls it."""

    role: Role
    name: str
    rows: int
    columns: int


class WeightSource(Protocol):
    """Where the weights of a model come from, by name; a ``WeightFile`` is one."""

    def read(self, name: str, *shape: int) -> Tensor:
        """A tensor in floats."""

    def read_stored(self, name: str, *shape: int) -> StoredWeight:
        """A matrix as it is stored."""


class NativeDecoder:
    """A model of Llama's shape, computed by the library of ``inference.kernels``."""

    def __init__(
        self,
        library: Library,
        model: ModelConfig,
        *,
        block_size: int,
        num_positions: int,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        self.model = model
        self._library = library
        self._block_size = block_size
        self._dtype = dtype
        shape = loader.Shape(
            **{name: getattr(model, name) for name in _SHAPE_FIELDS},
            block_size=block_size,
            kv_format=FORMATS[dtype],
            num_positions=num_positions,
        )
        handle = library.call("create", ctypes.byref(shape), num_threads, library.isa)
        if not handle:
            raise MemoryError("The native model could not be created.")
        self._handle: int = handle
        self._finalizer = weakref.finalize(self, library.call, "destroy", handle)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        artifact: Path,
        manifest: Manifest,
        *,
        library: Library,
        block_size: int,
        num_positions: int,
        dtype: torch.dtype,
        num_threads: int,
    ) -> Self:
        """The model of ``artifact``, for sequences of up to ``num_positions`` tokens.

        Raises:
            InvalidConfig: the family is not one of ``FAMILIES``.
            BrokenArtifact: a tensor is missing, has the wrong shape, or belongs to nothing.
        """
        started_at = time.monotonic()
        model = manifest.model
        family = family_of(model)
        decoder = cls(
            library,
            model,
            block_size=block_size,
            num_positions=num_positions,
            dtype=dtype,
            num_threads=num_threads,
        )
        with WeightFile(artifact) as file:
            decoder.pack(file, family, num_positions=num_positions)
            file.check_all_read()
        logger.info(
            "weights packed artifact=%s family=%s floats_as=%s kernel=%s stored=%s bytes=%d seconds=%.2f",
            artifact.name,
            model.family,
            dtype,
            library.name,
            file.describe(),
            decoder.packed_bytes,
            time.monotonic() - started_at,
        )
        return decoder

    def pack(self, weights: WeightSource, family: Family, *, num_positions: int) -> None:
        """Take every weight of the model, once and for all; before the first step."""
        self._load_weights(weights, family)
        self._set_rope(num_positions)
        self._library.call("finish", self._handle)

    @property
    def packed_bytes(self) -> int:
        """Memory of weights, norms and rotary table."""
        return int(self._library.call("packed_bytes", self._handle))

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Keys and values of a head as ``layout.h`` describes them."""
        return native_block_shape(self._library, self.model, block_size)

    def describe_numerics(self) -> dict[str, str]:
        """Facts that decide how a sum is rounded: neither threads nor the processor's model are among them.

        The version of torch is, for the sampler.
        """
        return {
            "kept_as": str(self._dtype),
            "kernel": self._library.name,
            "torch": torch.__version__,
            "sampler": torch.backends.cpu.get_cpu_capability(),
        }

    def compute(self, step: Step, cache: Tensor) -> Tensor:
        """As ``StepModel.compute``."""
        num_tokens, num_logits, spans = len(step.token_ids), len(step.logit_rows), step.spans
        vocab_size = self.model.vocab_size
        tables = [span.block_table for span in spans]
        arrays = {
            "token_ids": _int32(step.token_ids),
            "span_starts": _int32([span.start for span in spans]),
            "span_lengths": _int32([span.num_tokens for span in spans]),
            "table_offsets": _int32([0, *accumulate(map(len, tables))]),
            "block_tables": _int32(list(chain.from_iterable(tables))),
            "logit_rows": _int32(step.logit_rows),
        }
        for span in spans:
            if len(span.block_table) * self._block_size < span.end:
                raise ValueError(f"A block table does not cover {span.end} positions.")
        # Whole lanes are written; the rest of the last ones is cut off.
        logits = torch.empty((num_logits, -(-vocab_size // _LANES) * _LANES))
        native = loader.Step(
            num_tokens=num_tokens,
            num_spans=len(spans),
            num_logits=num_logits,
            num_blocks=cache.shape[1],
            cache=cache.data_ptr(),
            logits=logits.data_ptr(),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        self._library.call("step", self._handle, ctypes.byref(native))
        return logits[:, :vocab_size]

    def _load_weights(self, file: WeightSource, family: Family) -> None:
        model = self.model
        hidden, inner, vocab = model.hidden_size, model.intermediate_size, model.vocab_size
        queries, keys = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
        self._set_norm(file, 0, Norm.FINAL, family.final_norm)
        self._set_matrices(file, 0, (_Named(Role.EMBEDDING, family.embedding, vocab, hidden),))
        if not model.tie_word_embeddings:
            self._set_matrices(file, 0, (_Named(Role.HEAD, family.head, vocab, hidden),))
        for layer in range(model.num_layers):
            prefix = family.layer.format(layer)
            self._set_norm(file, layer, Norm.ATTENTION, prefix + family.attention_norm)
            self._set_norm(file, layer, Norm.MLP, prefix + family.mlp_norm)
            for with_one_input in (
                (
                    _Named(Role.QUERY, prefix + family.query, queries, hidden),
                    _Named(Role.KEY, prefix + family.key, keys, hidden),
                    _Named(Role.VALUE, prefix + family.value, keys, hidden),
                ),
                (_Named(Role.ATTENTION_OUTPUT, prefix + family.attention_output, hidden, queries),),
                (
                    _Named(Role.GATE, prefix + family.gate, inner, hidden),
                    _Named(Role.UP, prefix + family.up, inner, hidden),
                ),
                (_Named(Role.DOWN, prefix + family.down, hidden, inner),),
            ):
                self._set_matrices(file, layer, with_one_input)

    def _set_norm(self, file: WeightSource, layer: int, norm: Norm, name: str) -> None:
        scale = file.read(name, self.model.hidden_size).to(torch.float32).contiguous()
        self._library.call("set_norm", self._handle, layer, norm, scale.data_ptr())

    def _set_matrices(
        self, file: WeightSource, layer: int, with_one_input: Sequence[_Named]
    ) -> None:
        """Pack matrices that are multiplied with the same rows, and so quantise them in the same groups."""
        stored = [file.read_stored(each.name, each.rows, each.columns) for each in with_one_input]
        groups = [group for each in stored if (group := _group_size(each))]
        group = min(groups, default=0)
        for named, weight in zip(with_one_input, stored, strict=True):
            matrix, kept = describe_matrix(weight, group=group, dtype=self._dtype)
            self._library.call("set_matrix", self._handle, layer, named.role, ctypes.byref(matrix))
            del kept

    def _set_rope(self, num_positions: int) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(self.model))
        cosines, sines = angles.cos().contiguous(), angles.sin().contiguous()
        self._library.call("set_rope", self._handle, cosines.data_ptr(), sines.data_ptr())


def native_block_shape(library: Library, model: ModelConfig, block_size: int) -> tuple[int, ...]:
    """Shape of a KV block of one layer: ``[num_kv_heads, items of a head]``."""
    items = library.call("kv_items_per_head", model.head_dim, block_size)
    return (model.num_kv_heads, int(items))


def describe_matrix(
    weight: StoredWeight, *, group: int, dtype: torch.dtype
) -> tuple[loader.Matrix, Sequence[Tensor]]:
    """``weight`` as the library takes it, and the tensors that must live until it has.

    Floats are rounded to ``dtype``. ``group`` is the group in memory, a divisor of the stored one.
    """
    if weight.scheme is None:
        values = weight.parts[0].to(dtype).contiguous()
        rows, columns = values.shape
        matrix = loader.Matrix(
            format=FORMATS[dtype], rows=rows, columns=columns, values=values.data_ptr()
        )
        return matrix, (values,)
    kept = [part.contiguous() for part in weight.parts]
    codes, scale, *minimum = kept
    matrix = loader.Matrix(
        format=_INTEGERS[weight.scheme.name],
        rows=codes.shape[0],
        columns=codes.shape[1] * weight.scheme.num_codes_per_item,
        stored_group=_group_size(weight),
        group=group,
        values=codes.data_ptr(),
        scale=scale.data_ptr(),
        minimum=minimum[0].data_ptr() if minimum else None,
    )
    return matrix, kept


def _group_size(weight: StoredWeight) -> int:
    """Columns that share a scale; 0 for floats."""
    if weight.scheme is None:
        return 0
    codes, scale = weight.parts[:2]
    return codes.shape[1] * weight.scheme.num_codes_per_item // scale.shape[1]


def _int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
