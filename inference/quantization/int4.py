"""The one layout of integer weights: groups along the input, 4 or 8 bits, a scale for each group.

A weight ``W [out, in]`` is cut along ``in`` into groups of 32, 64 or 128. Four-bit codes 0..15 stand for
``code * scale + minimum``; two codes share a byte, the even column in the low nibble::

    packed[row, j] = codes[row, 2 * j] | codes[row, 2 * j + 1] << 4

Eight-bit codes -128..127 stand for ``code * scale``. Scales and minima are float16, and the arithmetic is float32:
a product of an integer code and a float16 is exact there, so only the sum rounds, once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GROUP_SIZES = (32, 64, 128)
MAX_CODE = 15

Codes = npt.NDArray[np.uint8]
SignedCodes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.float16]
Weights = npt.NDArray[np.float32]


class InvalidLayout(ValueError):
    """Arrays that do not belong together, or codes out of range; the message names the numbers."""


def pack(codes: Codes) -> Codes:
    """Two codes a byte: ``[..., in]`` values 0..15 become ``[..., in / 2]``.

    Raises:
        InvalidLayout: an odd number of columns, or a code above 15.
    """
    if codes.shape[-1] % 2:
        raise InvalidLayout(f"{codes.shape[-1]} columns cannot be packed; the number must be even.")
    if codes.size and int(codes.max()) > MAX_CODE:
        raise InvalidLayout(f"code {int(codes.max())} does not fit in 4 bits; it must be 0 to 15.")
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def unpack(packed: Codes) -> Codes:
    """One code a byte again: ``[..., in / 2]`` becomes ``[..., in]``; the inverse of ``pack``."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2] = packed & MAX_CODE
    codes[..., 1::2] = packed >> 4
    return codes


def dequantize(packed: Codes, scale: Scales, minimum: Scales) -> Weights:
    """The weights ``[out, in]`` of ``packed [out, in / 2]``, ``scale`` and ``minimum [out, in / group]``.

    Raises:
        InvalidLayout: the shapes do not give groups of 32, 64 or 128.
    """
    if scale.shape != minimum.shape:
        raise InvalidLayout(f"scale {scale.shape} and minimum {minimum.shape} must be equal.")
    codes = _in_groups(unpack(packed), scale)  # [out, num_groups, group]
    weights = codes * scale.astype(np.float32)[..., None] + minimum.astype(np.float32)[..., None]
    return weights.reshape(packed.shape[0], -1)


def dequantize_int8(codes: SignedCodes, scale: Scales) -> Weights:
    """The weights ``[out, in]`` of ``codes [out, in]`` and ``scale [out, in / group]``.

    Raises:
        InvalidLayout: the shapes do not give groups of 32, 64 or 128.
    """
    weights = _in_groups(codes, scale) * scale.astype(np.float32)[..., None]
    return weights.reshape(codes.shape)


def group_size(num_columns: int, num_groups: int) -> int:
    """How many columns share a scale.

    Raises:
        InvalidLayout: the columns do not divide into groups of 32, 64 or 128.
    """
    for size in GROUP_SIZES:
        if size * num_groups == num_columns:
            return size
    raise InvalidLayout(
        f"{num_columns} columns in {num_groups} groups: a group must hold 32, 64 or 128 columns."
    )


def _in_groups(codes: Codes | SignedCodes, scale: Scales) -> Weights:
    if codes.ndim != 2 or scale.ndim != 2 or codes.shape[0] != scale.shape[0]:
        raise InvalidLayout(f"codes {codes.shape} and scale {scale.shape} must have equal rows.")
    size = group_size(codes.shape[1], scale.shape[1])
    return codes.astype(np.float32).reshape(codes.shape[0], -1, size)
