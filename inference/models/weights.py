"""The tensors of an artifact by the part of the model they belong to: names by family, each read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference.artifact import WEIGHTS, BrokenArtifact
from inference.config import InvalidConfig, ModelConfig
from inference.quantization import SCHEMES, Scheme
from inference.quantization.int4 import GROUP_SIZES


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


def family_of(model: ModelConfig) -> Family:
    """The names of ``model``'s tensors.

    Raises:
        InvalidConfig: the family is not one of ``FAMILIES``.
    """
    if model.family not in FAMILIES:
        raise InvalidConfig(
            f"family={model.family!r} is not one we run; known are {', '.join(FAMILIES)}."
        )
    return FAMILIES[model.family]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as it is in the file: without ``scheme`` one tensor of floats, else the scheme's parts in order."""

    scheme: Scheme | None
    parts: tuple[Tensor, ...]


class WeightFile:
    """The safetensors file of an artifact, whose tensors are each read once.

    Raises:
        BrokenArtifact: the file is not there, or not a safetensors file.
    """

    def __init__(self, artifact: Path) -> None:
        self._path = artifact / WEIGHTS
        self._file = _open(self._path)
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
        """The tensor ``name``, which must have ``shape``; a quantised one comes back in float32.

        Raises:
            BrokenArtifact: it is missing, was read before, or has another shape.
        """
        stored = self._take_stored(name)
        if stored.scheme is None:
            [weight] = stored.parts
            kind = str(weight.dtype)
        else:
            weight = torch.from_numpy(
                stored.scheme.dequantize(*(part.numpy() for part in stored.parts))
            )
            kind = f"{stored.scheme.name} dequantised"
        self._check_shape(name, tuple(weight.shape), shape)
        self._num_read[kind] += 1
        return weight

    def read_stored(self, name: str, *shape: int) -> StoredWeight:
        """As ``read``, but a quantised weight stays as it is."""
        stored = self._take_stored(name)
        found = tuple(stored.parts[0].shape)
        if stored.scheme is not None:
            found = (*found[:-1], found[-1] * stored.scheme.num_codes_per_item)
        self._check_shape(name, found, shape)
        if stored.scheme is not None:
            self._check_groups(name, stored, shape)
        self._num_read[stored.scheme.name if stored.scheme else str(stored.parts[0].dtype)] += 1
        return stored

    def check_all_read(self) -> None:
        """Raises BrokenArtifact if a tensor is left over: whoever made the file meant something by it."""
        if self._unread:
            names = sorted(self._unread)
            raise self._broken(
                names[0], f"{len(names)} tensors belong to no part of the model, this the first."
            )

    def describe(self) -> str:
        """How many tensors were stored how, and whether they were dequantised on the way."""
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self._num_read.items()))

    def _take_stored(self, name: str) -> StoredWeight:
        for scheme in SCHEMES.values():
            if self._unread.issuperset(scheme.tensor_names(name)):
                return StoredWeight(scheme, tuple(map(self._take, scheme.tensor_names(name))))
        if name not in self._unread:
            raise self._broken(name, "the tensor is missing.")
        return StoredWeight(None, (self._take(name),))

    def _take(self, name: str) -> Tensor:
        self._unread.remove(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise self._broken(name, f"its shape is {found}, the model's is {wanted}.")

    def _check_groups(self, name: str, stored: StoredWeight, shape: tuple[int, ...]) -> None:
        rows, columns = shape
        possible = [(rows, columns // size) for size in GROUP_SIZES if columns % size == 0]
        shapes = {tuple(part.shape) for part in stored.parts[1:]}
        if len(shapes) != 1 or not shapes.issubset(possible):
            raise self._broken(name, f"scales {sorted(shapes)} do not fit {rows} x {columns}.")

    def _broken(self, name: str, problem: str) -> BrokenArtifact:
        return BrokenArtifact(
            str(self._path), name, problem, "Import the model again, with its own config."
        )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BrokenArtifact(str(path), "", f"{error}.", "Import the model again.") from error
