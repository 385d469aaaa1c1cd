"""What both importers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inference.artifact import BrokenArtifact
from inference.importers.checkpoint import (
    MAX_TEMPLATE_BYTES,
    check_chat_template,
    encode,
    from_bfloat16,
    read_rows,
    to_bfloat16,
)

Round = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
bits_16 = arrays.arrays(np.uint16, st.integers(1, 50))


@pytest.fixture(scope="module")
def round_by_torch() -> Round:
    """float32 rounded to bfloat16 by torch, as float32 again."""
    torch = pytest.importorskip("torch")

    def round_(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        rounded: Any = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
        return rounded  # type: ignore[no-any-return]

    return round_


@given(values=arrays.arrays(np.float32, st.integers(1, 50), elements=finite))
def test_bfloat16_is_rounded_as_torch_rounds(
    values: npt.NDArray[np.float32], round_by_torch: Round
) -> None:
    ours = from_bfloat16(to_bfloat16(values))

    assert np.array_equal(ours.view(np.uint32), round_by_torch(values).view(np.uint32))


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [(0x3F80_8000, 0x3F80), (0x3F81_8000, 0x3F82), (0x3F80_8001, 0x3F81), (0x3F81_7FFF, 0x3F81)],
)
def test_a_tie_goes_to_the_even_neighbour(bits: int, rounded: int) -> None:
    value = np.array([bits], dtype=np.uint32).view(np.float32)

    assert to_bfloat16(value).tolist() == [rounded]


@given(bits_16)
def test_a_bfloat16_value_is_stored_unchanged(bits: npt.NDArray[np.uint16]) -> None:
    bits = np.where(bits & 0x7F80 == 0x7F80, np.uint16(0), bits)

    assert np.array_equal(to_bfloat16(from_bfloat16(bits)), bits)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float, dtype: str) -> None:
    values = np.array([1.0, value], dtype=np.float32)

    with pytest.raises(BrokenArtifact, match=r"a\.gguf: w: it holds NaN or infinity"):
        encode(values, dtype, file="a.gguf", name="w")


def test_a_weight_that_bfloat16_would_make_infinite_is_refused() -> None:
    largest = np.array([np.finfo(np.float32).max], dtype=np.float32)

    assert np.array_equal(encode(largest, "float32", file="f", name="w"), largest)
    with pytest.raises(BrokenArtifact, match="--dtype float32"):
        encode(largest, "bfloat16", file="f", name="w")


def test_rows_come_in_pieces_of_whole_multiples(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    rows, row_bytes = 40, 2**20
    path.write_bytes(b"skip" + np.repeat(np.arange(rows), row_bytes).astype(np.uint8).tobytes())

    pieces = list(read_rows(path, 4, rows, row_bytes, multiple=3))

    assert [len(piece) for piece in pieces] == [3] * 13 + [1]
    assert np.array_equal(np.concatenate(pieces)[:, 0], np.arange(rows))


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"1234567")

    with pytest.raises(BrokenArtifact, match="became shorter"):
        list(read_rows(path, 0, 2, 4))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("a\n{% if x %}", "line 2"),
        ("{{ 1 +  }}", "line 1"),
        ("{% include_code %}", "line 1"),
        ("{{" + "(" * 50_000, "cannot be parsed"),
        ("\ud800", "cannot be parsed"),
        ("x" * (MAX_TEMPLATE_BYTES + 1), "longer than"),
    ],
)
def test_a_template_that_does_not_parse_is_refused(template: str, problem: str) -> None:
    with pytest.raises(BrokenArtifact, match=problem):
        check_chat_template(template)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "",
        "{% for m in messages %}{% break %}{% endfor %}",
        "{% generation %}a{% endgeneration %}",
    ],
)
def test_loop_controls_and_the_generation_tag_are_accepted(template: str | None) -> None:
    check_chat_template(template)
