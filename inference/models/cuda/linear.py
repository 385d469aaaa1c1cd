"""Matrices on a device: dense ones by its matrix library, int4 ones as they are stored by torch's own kernel.

Torch's int4 product (``aten::_weight_int4pack_mm``, "tinygemm"; on a CPU its twin with ``_for_cpu``) multiplies bfloat16
rows with ``(code - 8) * scale + zero`` in groups of 32, 64 or 128, scale and zero in bfloat16. A stored group is
``code * scale + minimum`` in float16, so ``zero = minimum + 8 * scale``: codes stay as they are, scale and zero are
rounded to 8 bits of mantissa. Its time grows with every 16 rows: made for decode, it is slower than a dense product for
long prompts.

Source of layouts and limits: PyTorch, aten/src/ATen/native/cuda/int4mm.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from inference.models.layers import pair_neighbours
from inference.models.weights import StoredWeight
from inference.quantization.int4 import group_size, unpack

Linear = Callable[[Tensor], Tensor]

_MIDDLE_CODE = 8
_ROWS = 16
_TILE_COLUMNS = 16
_INNER_TILES = (8, 4, 2)
_FIRST_CAPABILITY = (8, 0)


class Dense:
    """``x @ weight.T`` for a weight ``[out, in]``."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, rows: Tensor) -> Tensor:
        """``[num_rows, in]`` to ``[num_rows, out]``."""
        return functional.linear(rows, self.weight)


class Int4:
    """``x @ weight.T`` for a weight of four bits, ``packed`` as torch's kernel on its device wants it.

    ``scales_and_zeros`` is ``[in / group, out, 2]``.
    """

    __slots__ = ("_group", "_multiply", "_packed", "_scales_and_zeros")

    def __init__(self, packed: Tensor, scales_and_zeros: Tensor, group: int) -> None:
        self._packed = packed
        self._scales_and_zeros = scales_and_zeros
        self._group = group
        is_cpu = packed.device.type == "cpu"
        ops = torch.ops.aten
        self._multiply = ops._weight_int4pack_mm_for_cpu if is_cpu else ops._weight_int4pack_mm

    def __call__(self, rows: Tensor) -> Tensor:
        """``[num_rows, in]`` to ``[num_rows, out]``, both bfloat16."""
        product: Tensor = self._multiply(
            rows.contiguous(), self._packed, self._group, self._scales_and_zeros
        )
        return product


@dataclass(slots=True)
class LinearMaker:
    """Makes linear maps of stored weights, and counts: those that kept their four bits, and bytes that a step reads."""

    dtype: torch.dtype
    device: torch.device
    num_int4: int = 0
    num_widened: int = 0
    num_bytes: int = 0

    def make(self, stored: Sequence[StoredWeight]) -> Linear:
        """One map for weights with the same input, their outputs one after the other."""
        if self._keeps_int4(stored):
            self.num_int4 += 1
            return self._int4(stored)
        self.num_widened += any(weight.scheme is not None for weight in stored)
        return self.dense(stored)

    def dense(self, stored: Sequence[StoredWeight]) -> Dense:
        """As ``make``, in floats."""
        weight = self.to_device(torch.cat([widen(weight) for weight in stored]))
        self.num_bytes += weight.nbytes
        return Dense(weight)

    def to_device(self, weight: Tensor) -> Tensor:
        """The weight in the numbers and the place that it is computed in."""
        return weight.to(device=self.device, dtype=self.dtype)

    def _keeps_int4(self, stored: Sequence[StoredWeight]) -> bool:
        if self.dtype is not torch.bfloat16 or not _has_int4(self.device):
            return False
        if any(weight.scheme is None or weight.scheme.name != "int4" for weight in stored):
            return False
        num_rows = sum(weight.parts[0].shape[0] for weight in stored)
        return len({_group(weight) for weight in stored}) == 1 and num_rows % _ROWS == 0

    def _int4(self, stored: Sequence[StoredWeight]) -> Int4:
        codes, scale, minimum = (
            torch.cat([weight.parts[part] for weight in stored]) for part in range(3)
        )
        scale, minimum = scale.float(), minimum.float()
        zeros = minimum + _MIDDLE_CODE * scale
        both = torch.stack([scale, zeros], dim=-1).transpose(0, 1).contiguous()
        packed, both = _pack(codes, self.device), self.to_device(both)
        self.num_bytes += packed.nbytes + both.nbytes
        return Int4(packed, both, _group(stored[0]))


def widen(stored: StoredWeight) -> Tensor:
    """The numbers that a stored weight stands for; integers in float32."""
    if stored.scheme is None:
        return stored.parts[0]
    return torch.from_numpy(stored.scheme.dequantize(*(part.numpy() for part in stored.parts)))


def with_neighbours(stored: StoredWeight, head_dim: int) -> StoredWeight:
    """A query or key projection with its rotary pairs made neighbours: a matter of rows, whatever they hold."""
    return StoredWeight(
        stored.scheme, tuple(pair_neighbours(part, head_dim) for part in stored.parts)
    )


def _pack(codes: Tensor, device: torch.device) -> Tensor:
    """``codes [out, in / 2]``, the even column in the low nibble, in the order of the kernel's tiles."""
    num_columns = 2 * codes.shape[1]
    inner = next(tiles for tiles in _INNER_TILES if num_columns % (tiles * _TILE_COLUMNS) == 0)
    packed: Tensor
    if device.type == "cpu":
        single = torch.from_numpy(unpack(codes.numpy())).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(single, inner)
    else:
        swapped = codes << 4 | codes >> 4  # the kernel has the even column in the high nibble
        packed = torch.ops.aten._convert_weight_to_int4pack(swapped.to(device), inner)
    return packed


def _has_int4(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def _group(stored: StoredWeight) -> int:
    codes, scale = stored.parts[:2]
    return group_size(2 * codes.shape[1], scale.shape[1])
