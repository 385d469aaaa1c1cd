"""The header of a GGUF file, read without trusting it."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.artifact import BrokenArtifact
from inference.importers.gguf_file import MAX_TENSORS, read_header

U32, STRING, ARRAY = 4, 8, 9


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _string(name) + dims + struct.pack("<IQ", kind, offset)


def _file(
    keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: bytes = b"\0" * 64
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    return head + b"\0" * (-len(head) % 32) + data


VALID = _file(
    (
        _key("count", U32, struct.pack("<I", 7)),
        _key("name", STRING, _string("tiny")),
        _key("words", ARRAY, struct.pack("<IQ", STRING, 2) + _string("a") + _string("ü")),
        _key("sizes", ARRAY, struct.pack("<IQ2I", U32, 2, 1, 2)),
    ),
    (_tensor("a", (4, 2)), _tensor("b", (8,), offset=32)),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test puts its file."""
    return tmp_path / "test.gguf"


def test_metadata_and_places_are_read(path: Path) -> None:
    path.write_bytes(VALID)

    header = read_header(path)

    assert header.metadata == {"count": 7, "name": "tiny", "words": ["a", "ü"], "sizes": [1, 2]}
    assert header.tensors["a"].shape == (2, 4)
    assert header.tensors["a"].num_bytes == 32
    assert header.tensors["b"].start - header.tensors["a"].start == 32


@pytest.mark.parametrize("begin", [pickle.dumps({"weights": [1]}), b"PK\x03\x04 zip of torch.save"])
def test_a_pickle_is_refused_by_name(path: Path, begin: bytes) -> None:
    path.write_bytes(begin)

    with pytest.raises(BrokenArtifact, match=r"test\.gguf: magic: this is a pickle") as caught:
        read_header(path)

    assert caught.value.code == "unsupported_format"


@pytest.mark.slow
def test_the_header_is_that_of_the_gguf_package(gguf_path: Path) -> None:
    ours, theirs = read_header(gguf_path), gguf.GGUFReader(gguf_path)

    metadata = {
        key: f.contents() for key, f in theirs.fields.items() if not key.startswith("GGUF.")
    }
    places = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(reversed(tensor.shape.tolist())),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in theirs.tensors
    }
    assert ours.metadata == metadata
    assert {
        name: (tensor.type.name, tensor.shape, tensor.start, tensor.num_bytes)
        for name, tensor in ours.tensors.items()
    } == places


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "byte 0"),
        (b"GGML" + VALID[4:], "magic"),
        (VALID[:4] + struct.pack("<I", 1) + VALID[8:], "version"),
        (VALID[:8] + struct.pack("<Q", 2**63) + VALID[16:], "tensor count"),
        (VALID[:8] + struct.pack("<Q", MAX_TENSORS + 1) + VALID[16:], "tensor count"),
        (VALID[:16] + struct.pack("<Q", 2**63) + VALID[24:], "key count"),
        (_file((struct.pack("<Q", 2**62),)), "metadata key"),
        (_file((_key("k", STRING, struct.pack("<Q", 2**64 - 1)),)), "k"),
        (_file((_key("k", ARRAY, struct.pack("<IQ", U32, 2**60)),)), "k"),
        (_file((_key("k", ARRAY, struct.pack("<IQ", STRING, 2**60)),)), "k"),
        (_file((_key("k", ARRAY, struct.pack("<IQ", ARRAY, 1)),)), "arrays of arrays"),
        (_file((_key("k", 13, b""),)), "value type 13"),
        (_file((_key("k", STRING, _string(b"\xff")),)), "UTF-8"),
        (_file((_key("k", U32, b"\0" * 4),) * 2), "occurs twice"),
        (_file((_key("general.alignment", U32, struct.pack("<I", 24)),)), "general.alignment"),
        (_file((_key("general.alignment", U32, struct.pack("<I", 0)),)), "general.alignment"),
        (_file(tensors=(_tensor("t", ()),)), "0 dimensions"),
        (_file(tensors=(_tensor("t", (1,) * 5),)), "5 dimensions"),
        (_file(tensors=(_tensor("t", (0,)),)), "shape"),
        (_file(tensors=(_tensor("t", (2**63, 2)),)), "shape"),
        (_file(tensors=(_tensor("t", (31,), kind=2),)), "shape"),
        (_file(tensors=(_tensor("t", (256,), kind=14),)), "Q6_K is not supported"),
        (_file(tensors=(_tensor("t", (256,), kind=99),)), "99 is not supported"),
        (_file(tensors=(_tensor("t", (17,)),)), "beyond the end"),
        (_file(tensors=(_tensor("t", (8,), offset=32),)), "gap or overlaps"),
        (_file(tensors=(_tensor("t", (8,)), _tensor("u", (8,)))), "gap or overlaps"),
        (_file(tensors=(_tensor("t", (8,)), _tensor("t", (8,), offset=32))), "occurs twice"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(path: Path, raw: bytes, named: str) -> None:
    path.write_bytes(raw)

    with pytest.raises(BrokenArtifact, match=named):
        read_header(path)


def test_a_file_cut_off_anywhere_is_refused(path: Path) -> None:
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])

        with pytest.raises(BrokenArtifact):
            read_header(path)


@settings(max_examples=500, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=6
    )
)
def test_changed_bytes_are_read_or_refused_and_nothing_else(
    changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(VALID)
    for position, value in changes:
        raw[position] = value
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(raw)

    try:
        header = read_header(path)
    except BrokenArtifact:
        return

    for tensor in header.tensors.values():
        assert 0 < tensor.start <= len(raw) - tensor.num_bytes
