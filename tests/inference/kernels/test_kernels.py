"""Each native kernel against numpy or torch, on shapes that fit no register."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from inference.kernels.loader import Isa
from tests.inference.kernels.native_calls import (
    DTYPES,
    Floats,
    library,
    multiply,
    quantize,
    quantize_in_numpy,
    random_weight,
)

SEEDS = st.integers(0, 2**32 - 1)
ROWS = st.integers(1, 21)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    library()
    torch.set_num_threads(1)


def _random(shape: tuple[int, ...], seed: int) -> tuple[Floats, np.random.Generator]:
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype=np.float32), generator


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DTYPES)), ROWS, st.integers(1, 70), st.integers(1, 130), SEEDS)
def test_floats_are_multiplied(
    kind: str, num_rows: int, outputs: int, columns: int, seed: int
) -> None:
    x, generator = _random((num_rows, columns), seed)
    weight = random_weight(kind, outputs, columns, 0, generator)
    y = multiply(weight, x, group=0, kind=kind, isa=Isa.AVX512_VNNI)
    expected = x.astype(np.float64) @ weight.parts[0].double().numpy().T
    np.testing.assert_allclose(y, expected, atol=2e-6 * columns, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["int4", "int8"]),
    st.sampled_from([(32, 32), (64, 64), (64, 32), (128, 128), (128, 32)]),
    ROWS,
    st.integers(1, 70),
    st.integers(1, 4),
    SEEDS,
)
def test_integers_are_multiplied_as_integers(
    kind: str, groups: tuple[int, int], num_rows: int, outputs: int, num_groups: int, seed: int
) -> None:
    """Exactly the product of the two quantised sides: only the float32 sum over the groups may round."""
    stored_group, group = groups
    x, generator = _random((num_rows, num_groups * stored_group), seed)
    weight = random_weight(kind, outputs, x.shape[1], stored_group, generator)
    assert weight.scheme is not None
    y = multiply(weight, x, group=group, kind=kind, isa=Isa.AVX512_VNNI)
    dense = weight.scheme.dequantize(*(part.numpy() for part in weight.parts)).astype(np.float64)
    quantized = quantize_in_numpy(x, group).values()
    size = np.abs(quantized) @ np.abs(dense).T
    np.testing.assert_array_less(np.abs(y - quantized @ dense.T), 4e-7 * size + 1e-6)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["int4", "int8", *sorted(DTYPES)]), st.integers(2, 40), SEEDS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    kind: str, num_rows: int, seed: int
) -> None:
    x, generator = _random((num_rows, 96), seed)
    weight = random_weight(kind, 37, 96, 32, generator)
    group = 32 if kind.startswith("int") else 0
    together = multiply(weight, x, group=group, kind=kind, isa=Isa.AVX512_VNNI)
    for row in range(num_rows):
        alone = multiply(weight, x[row : row + 1], group=group, kind=kind, isa=Isa.AVX512_VNNI)
        assert alone.tobytes() == together[row].tobytes()


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 40), st.integers(1, 130), SEEDS)
def test_bfloat16_is_multiplied_by_its_own_instruction(
    num_rows: int, outputs: int, columns: int, seed: int
) -> None:
    if library().isa < Isa.AVX512_BF16:
        pytest.skip("the CPU does not say that it has AVX512-BF16")
    x, generator = _random((num_rows, columns), seed)
    weight = random_weight("bfloat16", outputs, columns, 0, generator)
    y = multiply(weight, x, group=0, kind="bfloat16", isa=Isa.AVX512_BF16)
    rounded = torch.from_numpy(x).bfloat16().double()
    expected = (rounded @ weight.parts[0].double().T).numpy()
    np.testing.assert_allclose(y, expected, atol=2e-6 * columns, rtol=0)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from([32, 64, 128]), st.integers(1, 4), SEEDS)
def test_rows_are_quantised(num_rows: int, group: int, num_groups: int, seed: int) -> None:
    x, _ = _random((num_rows, num_groups * group), seed)
    x[0, :group] = 0.0
    found, expected = quantize(x, group), quantize_in_numpy(x, group)
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)
    np.testing.assert_array_equal(found.offsets, expected.offsets)


def test_what_is_no_number_stays_none_when_it_is_quantised() -> None:
    x, _ = _random((2, 64), 0)
    x[0, 40] = np.nan
    scales = quantize(x, 32).scales
    assert np.isnan(scales).tolist() == [[False, True], [False, False]]


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 200), SEEDS)
def test_rows_are_normed(num_rows: int, columns: int, seed: int) -> None:
    x, generator = _random((num_rows, columns), seed)
    scale = generator.standard_normal(columns, dtype=np.float32)
    y = np.zeros_like(x)
    arrays = (x, scale, y)
    library().call(
        "test_rms_norm", num_rows, columns, 1e-5, *(array.ctypes.data for array in arrays)
    )
    expected = functional.rms_norm(
        torch.from_numpy(x), (columns,), torch.from_numpy(scale), eps=1e-5
    )
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_gates_are_applied_over_the_whole_range() -> None:
    gate = np.linspace(-120, 120, 4096, dtype=np.float32).reshape(4, 1024)
    up, _ = _random(gate.shape, 1)
    y = np.zeros_like(gate)
    library().call("test_silu", 4, 1024, gate.ctypes.data, up.ctypes.data, y.ctypes.data)
    expected = functional.silu(torch.from_numpy(gate).double()).numpy() * up
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gate_that_is_no_finite_number_is_not_hidden(value: float) -> None:
    gate = np.full((1, 16), value, dtype=np.float32)
    up, y = np.ones_like(gate), np.zeros_like(gate)
    library().call("test_silu", 1, 16, gate.ctypes.data, up.ctypes.data, y.ctypes.data)
    assert not np.isfinite(y).any()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 70), SEEDS)
def test_heads_are_turned(num_heads: int, half: int, seed: int) -> None:
    heads, generator = _random((num_heads, 2 * half), seed)
    angles = generator.uniform(0, 7, half)
    cosines, sines = (each(angles).astype(np.float32) for each in (np.cos, np.sin))
    left, right = heads[:, :half], heads[:, half:]
    expected = np.concatenate(
        [left * cosines - right * sines, right * cosines + left * sines], axis=1
    )
    arrays = (cosines, sines, heads)
    library().call("test_rotate", num_heads, 2 * half, *(array.ctypes.data for array in arrays))
    np.testing.assert_allclose(heads, expected, atol=1e-6)
