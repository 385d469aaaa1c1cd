"""Single native kernels on numpy arrays, and the same arithmetic in numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inference.kernels import loader
from inference.kernels.loader import Isa, KernelUnavailable, Library
from inference.models.native import describe_matrix
from inference.models.weights import StoredWeight
from inference.quantization import SCHEMES
from inference.quantization.int4 import pack

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int8]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def library() -> Library:
    """The native library, or a skip that says why not."""
    try:
        return loader.load_library()
    except KernelUnavailable as error:
        pytest.skip(f"no native kernel: {error}")


def random_weight(
    kind: str, rows: int, columns: int, group: int, generator: np.random.Generator
) -> StoredWeight:
    """A weight as an artifact stores it, of a float dtype, ``int4`` or ``int8``."""
    if kind in DTYPES:
        values = generator.standard_normal((rows, columns), dtype=np.float32)
        return StoredWeight(None, (torch.from_numpy(values).to(DTYPES[kind]),))
    scale = generator.uniform(0.001, 0.1, (rows, columns // group)).astype(np.float16)
    if kind == "int8":
        codes = generator.integers(-128, 128, (rows, columns), dtype=np.int8)
        return StoredWeight(SCHEMES[kind], (torch.from_numpy(codes), torch.from_numpy(scale)))
    codes4 = pack(generator.integers(0, 16, (rows, columns), dtype=np.uint8))
    minimum = generator.uniform(-0.5, 0.1, scale.shape).astype(np.float16)
    parts = (torch.from_numpy(part) for part in (codes4, scale, minimum))
    return StoredWeight(SCHEMES[kind], tuple(parts))


def multiply(weight: StoredWeight, x: Floats, *, group: int, kind: str, isa: Isa) -> Floats:
    """``x @ weight.T`` by the native kernel."""
    dtype = DTYPES.get(kind, torch.float32)
    matrix, kept = describe_matrix(weight, group=group, dtype=dtype)
    y = np.zeros((x.shape[0], matrix.rows), dtype=np.float32)
    library().call(
        "test_linear", ctypes.byref(matrix), isa, x.shape[0], x.ctypes.data, y.ctypes.data
    )
    del kept
    return y


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows as int8: ``codes`` ``[rows, columns]``, ``scales`` and ``offsets`` ``[rows, groups]``."""

    codes: Integers
    scales: Floats
    offsets: Floats

    def values(self) -> npt.NDArray[np.float64]:
        """What the codes stand for."""
        rows, columns = self.codes.shape
        grouped = self.codes.reshape(rows, self.scales.shape[1], -1).astype(np.float64)
        return (grouped * self.scales[..., None]).reshape(rows, columns)


def quantize(x: Floats, group: int) -> Quantized:
    """By the native kernel."""
    rows, columns = x.shape
    padded = np.concatenate([x.reshape(-1), np.zeros(64, dtype=np.float32)])
    codes = np.zeros(rows * columns + 64, dtype=np.int8)
    scales, offsets = (np.zeros((rows, columns // group), dtype=np.float32) for _ in range(2))
    arrays = (padded, codes, scales, offsets)
    library().call("test_quantize", rows, columns, group, *(array.ctypes.data for array in arrays))
    return Quantized(codes[: rows * columns].reshape(rows, columns), scales, offsets)


def quantize_in_numpy(x: Floats, group: int) -> Quantized:
    """The same arithmetic, operation by operation."""
    grouped = x.reshape(x.shape[0], -1, group)
    largest = np.abs(grouped).max(-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(grouped * inverse[..., None]).astype(np.int8)
    scales = largest / np.float32(127)
    offsets = scales * codes.sum(-1, dtype=np.int32).astype(np.float32)
    return Quantized(codes.reshape(x.shape), scales, offsets)
