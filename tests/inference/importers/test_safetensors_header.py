"""The header of a safetensors file, checked before the file is used."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from inference.artifact import BrokenArtifact
from inference.importers.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, read_header


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _file(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test puts its file."""
    return tmp_path / "model.safetensors"


def test_a_file_of_the_safetensors_library_is_accepted(path: Path) -> None:
    weights: dict[str, npt.NDArray[Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.float16),
        "scalar": np.array(1.0, dtype=np.float32),
    }
    save_file(weights, path, metadata={"format": "pt"})

    tensors = read_header(path)

    raw = path.read_bytes()
    assert tensors.keys() == weights.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == weights[name].shape
        assert raw[tensor.start : tensor.start + tensor.num_bytes] == weights[name].tobytes()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "length"),
        ((2**63).to_bytes(8, "little") + b"{}", "length"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}" * MAX_HEADER_BYTES, "length"),
        (_file(b"{" * 10), "no valid JSON"),
        (_file(b"[" * 100_000), "no valid JSON"),
        (_file(b"\xff\xfe"), "no valid JSON"),
        (_file([]), "not an object"),
        (_file({}), "has 0 tensors"),
        (_file({str(i): _entry() for i in range(MAX_TENSORS + 1)}), "has 20001 tensors"),
        (_file(b'{"a": 1, "a": 2}'), "a key occurs twice"),
        (_file({"a": 1}), "it needs dtype, shape and data_offsets"),
        (_file({"a": {**_entry(), "more": 1}}), "it needs dtype, shape and data_offsets"),
        (_file({"a": _entry(dtype="F64")}), "dtype 'F64'"),
        (_file({"a": _entry(dtype=["F32"])}), "dtype"),
        (_file({"a": _entry(shape=2)}), "shape 2"),
        (_file({"a": _entry(shape=[-2])}), "shape"),
        (_file({"a": _entry(shape=[2.0])}), "shape"),
        (_file({"a": _entry(shape=[True, 2])}), "shape"),
        (_file({"a": _entry(shape=[1] * 5)}), "shape"),
        (_file({"a": _entry(shape=[2**60, 2**60])}), "shape"),
        (_file({"a": _entry(offsets=[0])}), "data_offsets"),
        (_file({"a": _entry(offsets=[8, 0])}), "need 8 bytes"),
        (_file({"a": _entry(offsets=[0, 4])}), "need 8 bytes"),
        (_file({"a": _entry(), "b": _entry()}), "gap or overlap"),
        (_file({"a": _entry(offsets=[4, 12])}, b"\0" * 12), "gap or overlap"),
        (_file({"a": _entry()}, b"\0" * 9), "the data ends at byte"),
        (_file({"a": _entry()}, b"\0" * 7), "the data ends at byte"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(path: Path, raw: bytes, problem: str) -> None:
    path.write_bytes(raw)

    with pytest.raises(BrokenArtifact, match=problem):
        read_header(path)


def test_a_dtype_that_the_caller_does_not_want_is_refused(path: Path) -> None:
    save_file({"a": np.zeros(3, np.uint8)}, path)

    assert read_header(path)["a"].dtype == "U8"
    with pytest.raises(BrokenArtifact, match="dtype 'U8' is none of F32, F16, BF16"):
        read_header(path, ("F32", "F16", "BF16"))


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header whose tensors lie side by side in some order, and the size of their data."""
    shapes = draw(st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5))
    header, position = {}, 0
    for index, shape in enumerate(shapes):
        end = position + prod(shape) * 2
        header[f"t{index}"] = _entry(draw(st.sampled_from(["F16", "BF16"])), shape, [position, end])
        position = end
    names = draw(st.permutations(list(header)))
    return {name: header[name] for name in names}, position


@settings(deadline=None)
@given(layout=_layouts())
def test_tensors_side_by_side_are_accepted_in_any_order(
    layout: tuple[dict[str, Any], int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    header, size = layout
    path = tmp_path_factory.getbasetemp() / "layout.safetensors"
    path.write_bytes(_file(header, b"\0" * size))

    tensors = read_header(path)

    start = path.stat().st_size - size
    for name, entry in header.items():
        assert tensors[name].start == start + entry["data_offsets"][0]


@settings(deadline=None)
@given(layout=_layouts(), shift=st.sampled_from([-2, -1, 1, 2]), data=st.data())
def test_a_tensor_moved_by_a_byte_is_refused(
    layout: tuple[dict[str, Any], int],
    shift: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    header, size = layout
    entry = header[data.draw(st.sampled_from(sorted(header)))]
    entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]
    path = tmp_path_factory.getbasetemp() / "moved.safetensors"
    path.write_bytes(_file(header, b"\0" * size))

    with pytest.raises(BrokenArtifact):
        read_header(path)
