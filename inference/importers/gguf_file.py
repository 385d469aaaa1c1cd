"""What a GGUF file says about itself: metadata, and where each tensor lies.

Every count and length is checked against the bytes that are left *before* anything is allocated or looped over: a
reader that trusts them spins for ever, or reads beyond the file. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little-endian; 2 differs in nothing here).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

from inference.artifact import BrokenArtifact, open_regular

MAX_KEYS = 4_096
MAX_TENSORS = 20_000
MAX_ARRAY_ITEMS = 4_000_000
MAX_STRING_BYTES = 4 * 2**20
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorType:
    """How values are stored: ``block_bytes`` bytes hold ``block_values`` values of one row."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    30: TensorType("BF16", 1, 2),
}
# Named so that a refusal can say what the file holds.
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; ``shape`` is ``[out, in]``, the reverse of GGUF's order. ``start`` counts from the file's begin."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; blocks never cross rows."""
        return self.shape[-1] // self.type.block_values * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at ``path``; every tensor it names lies inside the file.

    Raises:
        BrokenArtifact: not GGUF, or cut off, or its counts, lengths, types or offsets cannot be true.
    """
    with open_regular(path) as file:
        reader = _Reader(file, path)
        if (magic := reader.take(4)) != b"GGUF":
            raise _refuse_magic(path, magic)
        if (version := reader.scalar("I")) not in (2, 3):
            raise reader.refuse(
                "version", f"{version} is not supported, only 2 and 3.", code="unsupported_format"
            )
        num_tensors = reader.count("tensor count", limit=MAX_TENSORS, item_bytes=24)
        num_keys = reader.count("key count", limit=MAX_KEYS, item_bytes=13)
        metadata = _read_metadata(reader, num_keys)
        infos = [_read_tensor_info(reader) for _ in range(num_tensors)]
        return GgufHeader(metadata, _place_tensors(reader, metadata, infos))


def _refuse_magic(path: Path, magic: bytes) -> BrokenArtifact:
    problem, mend = "this is no GGUF file.", "Download or export the file again."
    # What torch.save() writes: a pickle, since torch 1.6 inside a zip.
    if magic[:1] == b"\x80" or magic == b"PK\x03\x04":
        problem = "this is a pickle, which can run code when it is read, so it is not accepted."
        mend = "Convert the weights to safetensors or GGUF."
    return BrokenArtifact(path.name, "magic", problem, mend, code="unsupported_format")


class _Reader:
    """Takes values from the front of a file, never more than it has."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self._file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def refuse(self, field: str, problem: str, *, code: str = "broken_artifact") -> BrokenArtifact:
        return BrokenArtifact(
            self.path.name, field, problem, "Download or export the file again.", code=code
        )

    def take(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.refuse(
                f"byte {self.position}", f"the file ends, {num_bytes} more bytes are needed."
            )
        self.position += num_bytes
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, field: str, *, limit: int, item_bytes: int) -> int:
        number: int = self.scalar("Q")
        if number > limit or number * item_bytes > self.size - self.position:
            raise self.refuse(
                field,
                f"{number} at byte {self.position} is more than the file or the limit allows.",
            )
        return number

    def string(self, field: str) -> str:
        raw = self.take(self.count(field, limit=MAX_STRING_BYTES, item_bytes=1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(field, f"no valid UTF-8 before byte {self.position}.") from error

    def value(self, field: str) -> Any:
        kind = self.scalar("I")
        if kind != _ARRAY:
            return self._one(field, kind)
        kind = self.scalar("I")
        if kind == _ARRAY:
            raise self.refuse(field, "arrays of arrays are not supported.")
        item_bytes = 8 if kind == _STRING else struct.calcsize(self._code(field, kind))
        number = self.count(field, limit=MAX_ARRAY_ITEMS, item_bytes=item_bytes)
        if kind == _STRING:
            return [self.string(field) for _ in range(number)]
        code = self._code(field, kind)
        return list(struct.unpack(f"<{number}{code}", self.take(number * item_bytes)))

    def _one(self, field: str, kind: int) -> Any:
        return self.string(field) if kind == _STRING else self.scalar(self._code(field, kind))

    def _code(self, field: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.refuse(field, f"value type {kind} is not known.")
        return _SCALARS[kind]


def _read_metadata(reader: _Reader, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string("metadata key")
        if key in metadata:
            raise reader.refuse(key, "the key occurs twice.")
        metadata[key] = reader.value(key)
    return metadata


def _read_tensor_info(reader: _Reader) -> GgufTensor:
    """A tensor whose ``start`` still counts from the begin of the data."""
    name = reader.string("tensor name")
    if not 1 <= (num_dimensions := reader.scalar("I")) <= MAX_DIMENSIONS:
        raise reader.refuse(name, f"{num_dimensions} dimensions; allowed are 1 to 4.")
    shape = tuple(reader.scalar("Q") for _ in range(num_dimensions))[::-1]
    type_id, offset = reader.scalar("I"), reader.scalar("Q")
    if type_id not in TENSOR_TYPES:
        label = _OTHER_TYPES.get(type_id, str(type_id))
        known = ", ".join(sorted(kind.name for kind in TENSOR_TYPES.values()))
        raise BrokenArtifact(
            reader.path.name,
            name,
            f"tensor type {label} is not supported.",
            f"Convert the file to one of {known}.",
            code="unsupported_model",
        )
    kind = TENSOR_TYPES[type_id]
    if not all(0 < size < 2**40 for size in shape) or shape[-1] % kind.block_values:
        raise reader.refuse(name, f"shape {shape} is not possible for {kind.name}.")
    return GgufTensor(name, kind, shape, offset)


def _place_tensors(
    reader: _Reader, metadata: Mapping[str, Any], infos: list[GgufTensor]
) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**16 or alignment & (alignment - 1):
        raise reader.refuse("general.alignment", f"{alignment!r} is not a power of two.")
    data_start = _round_up(reader.position, alignment)
    tensors: dict[str, GgufTensor] = {}
    position = 0
    for info in sorted(infos, key=lambda info: info.start):
        if info.name in tensors:
            raise reader.refuse(info.name, "the tensor occurs twice.")
        if info.start != position:
            raise reader.refuse(info.name, "its offset leaves a gap or overlaps another tensor.")
        position = _round_up(info.start + info.num_bytes, alignment)
        if data_start + info.start + info.num_bytes > reader.size:
            raise reader.refuse(info.name, "its data reaches beyond the end of the file.")
        tensors[info.name] = GgufTensor(info.name, info.type, info.shape, data_start + info.start)
    return tensors


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
