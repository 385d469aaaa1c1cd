"""The layout of integer weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inference.quantization import SCHEMES
from inference.quantization.int4 import (
    GROUP_SIZES,
    InvalidLayout,
    dequantize,
    dequantize_int8,
    pack,
    unpack,
)

even_shapes = st.tuples(st.integers(1, 5), st.integers(1, 40).map(lambda half: half * 2))
codes_4bit = even_shapes.flatmap(
    lambda shape: arrays.arrays(np.uint8, shape, elements=st.integers(0, 15))
)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[int, int, int]:
    """Rows, groups, and columns in a group."""
    return (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(GROUP_SIZES)),
    )


def _random_codes(
    rows: int, columns: int, low: int, high: int, dtype: npt.DTypeLike
) -> npt.NDArray[np.int64]:
    return np.random.default_rng(rows * columns).integers(low, high, (rows, columns)).astype(dtype)


def _random_scales(rows: int, groups: int, seed: int) -> npt.NDArray[np.float16]:
    return np.random.default_rng(seed).standard_normal((rows, groups)).astype(np.float16)


@given(codes_4bit)
def test_unpacking_gives_back_what_was_packed(codes: npt.NDArray[np.uint8]) -> None:
    packed = pack(codes)

    assert packed.shape == (codes.shape[0], codes.shape[1] // 2)
    assert packed.dtype == np.uint8
    assert np.array_equal(unpack(packed), codes)


@given(arrays.arrays(np.uint8, even_shapes))
def test_packing_gives_back_what_was_unpacked(packed: npt.NDArray[np.uint8]) -> None:
    assert np.array_equal(pack(unpack(packed)), packed)


def test_the_even_column_lies_in_the_low_nibble() -> None:
    packed = pack(np.array([[1, 2, 15, 0]], dtype=np.uint8))

    assert packed.tolist() == [[0x21, 0x0F]]


@given(grouped())
def test_a_4bit_weight_is_its_code_times_scale_plus_minimum(shape: tuple[int, int, int]) -> None:
    rows, groups, size = shape
    codes = _random_codes(rows, groups * size, 0, 16, np.uint8)
    scale, minimum = _random_scales(rows, groups, 1), _random_scales(rows, groups, 2)

    weights = dequantize(pack(codes.astype(np.uint8)), scale, minimum)

    assert weights.dtype == np.float32
    for row, column in np.ndindex(codes.shape):
        group = column // size
        exact = float(codes[row, column]) * float(scale[row, group]) + float(minimum[row, group])
        assert weights[row, column] == np.float32(exact)


@given(grouped())
def test_an_8bit_weight_is_its_code_times_scale(shape: tuple[int, int, int]) -> None:
    rows, groups, size = shape
    codes = _random_codes(rows, groups * size, -128, 128, np.int8)
    scale = _random_scales(rows, groups, 3)

    weights = dequantize_int8(codes.astype(np.int8), scale)

    for row, column in np.ndindex(codes.shape):
        exact = float(codes[row, column]) * float(scale[row, column // size])
        assert weights[row, column] == exact


def test_a_code_of_five_bits_is_refused() -> None:
    with pytest.raises(InvalidLayout, match="code 16 does not fit"):
        pack(np.array([[0, 16]], dtype=np.uint8))


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(InvalidLayout, match="3 columns"):
        pack(np.zeros((1, 3), dtype=np.uint8))


@pytest.mark.parametrize(("columns", "groups"), [(64, 4), (256, 1), (96, 2), (32, 0)])
def test_groups_of_another_size_are_refused(columns: int, groups: int) -> None:
    packed = np.zeros((1, columns // 2), dtype=np.uint8)
    scale = np.ones((1, groups), dtype=np.float16)

    with pytest.raises(InvalidLayout, match="a group must hold"):
        dequantize(packed, scale, scale)


def test_a_minimum_of_another_shape_is_refused() -> None:
    packed = np.zeros((2, 16), dtype=np.uint8)

    with pytest.raises(InvalidLayout, match="must be equal"):
        dequantize(packed, np.ones((2, 1), np.float16), np.ones((1, 1), np.float16))


def test_scales_for_other_rows_are_refused() -> None:
    with pytest.raises(InvalidLayout, match="equal rows"):
        dequantize_int8(np.zeros((2, 32), np.int8), np.ones((3, 1), np.float16))


def test_a_scheme_reads_a_weight_by_the_names_of_its_parts() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(1, 64) % 16
    stored: dict[str, npt.NDArray[Any]] = {
        "w.int4": pack(codes),
        "w.scale": np.array([[0.5, 2.0]], dtype=np.float16),
        "w.minimum": np.array([[-1.0, 3.0]], dtype=np.float16),
    }

    weights = SCHEMES["int4"].read("w", stored)

    assert SCHEMES["int4"].tensor_names("w") == ("w.int4", "w.scale", "w.minimum")
    assert weights[0, 1] == 0.5 * 1 - 1.0
    assert weights[0, 33] == 2.0 * 1 + 3.0
