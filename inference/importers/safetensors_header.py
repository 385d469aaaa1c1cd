"""The header of a safetensors file, checked before anything else reads the file.

The tensors must fill the file without gaps and overlaps, so that no byte has two meanings or none.
Layout: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON object, the data).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from inference.artifact import ITEM_SIZES, BrokenArtifact, open_regular, parse_json

MAX_HEADER_BYTES = 8 * 2**20
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: ``start`` counts from the first byte of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path, dtypes: Iterable[str] = tuple(ITEM_SIZES)) -> dict[str, StoredTensor]:
    """Where each tensor of a safetensors file lies, checked before anything else reads the file.

    The tensors fill the file without gaps and overlaps, so that no byte has two meanings or none.
    Layout: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON object, the data).

    Raises:
        BrokenArtifact: the header is too long, not JSON, has duplicate keys, or lies about the data.
    """
    with open_regular(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8):
            raise _bad_header(path, "length", f"{length} bytes do not fit.")
        header = parse_json(path, file.read(length))
    if not isinstance(header, dict):
        raise _bad_header(path, "header", "it is not an object.")
    header.pop("__metadata__", None)
    if not 1 <= len(header) <= MAX_TENSORS:
        raise _bad_header(
            path, "header", f"it has {len(header)} tensors, allowed are 1 to {MAX_TENSORS}."
        )
    allowed = {dtype: ITEM_SIZES[dtype] for dtype in dtypes}
    tensors = {
        name: _check_tensor(path, name, entry, allowed, 8 + length)
        for name, entry in header.items()
    }
    _check_contiguous(path, tensors, start=8 + length, end=file_size)
    return tensors


def _check_tensor(
    path: Path, name: str, entry: Any, allowed: Mapping[str, int], data_start: int
) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad_header(path, name, "it needs dtype, shape and data_offsets, and nothing else.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in allowed:
        raise _bad_header(path, name, f"dtype {dtype!r} is none of {', '.join(allowed)}.")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _bad_header(path, name, f"shape {str(shape)[:80]} is not valid.")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _bad_header(path, name, f"data_offsets {str(offsets)[:80]} are not valid.")
    start, end = offsets
    num_bytes = prod(shape) * allowed[dtype]
    if end - start != num_bytes:
        raise _bad_header(
            path, name, f"shape and dtype need {num_bytes} bytes, the offsets span {end - start}."
        )
    return StoredTensor(dtype, tuple(shape), data_start + start, num_bytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**48 for item in value
    )


def _check_contiguous(
    path: Path, tensors: Mapping[str, StoredTensor], *, start: int, end: int
) -> None:
    position = start
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        if tensor.start != position:
            raise _bad_header(path, name, "its offsets leave a gap or overlap another tensor.")
        position += tensor.num_bytes
    if position != end:
        raise _bad_header(
            path, "data_offsets", f"the data ends at byte {position}, the file at byte {end}."
        )


def _bad_header(path: Path, field: str, problem: str) -> BrokenArtifact:
    return BrokenArtifact(path.name, field, problem, "Download or export the file again.")
