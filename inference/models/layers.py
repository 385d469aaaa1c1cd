"""Layers of a decoder in plain torch: linear maps in tiles, RMS normalisation, rotary embedding.

A row's result does not depend on the rows beside it: each is reduced in one fixed order, whatever the number of rows.
``Linear`` says what that takes on a CPU; the tests compare bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from inference.config import ModelConfig, RopeScaling

MIN_ROWS = 4
"""Callers pad a step to at least this many rows; see ``Linear``."""

_MIN_TILE = 64
_MAX_TILE = 288


class Linear:
    """``x @ weight.T`` for a weight ``[out, in]``, which it holds as tiles ``[num_tiles, in, tile]``.

    A CPU's matrix library picks its kernel, and with it the order of summation, by the number of rows. Measured with
    MKL in float32: ``torch.nn.functional.linear`` has three orders (1 row, 2 to 15, 16 and more), a batched product of
    tiles with the input dimension outermost has two (1 row, 2 and more). From 4 to 64 rows it is also 1.1 to 1.6
    times as fast, since a tile stays in cache; a single row, padded to ``MIN_ROWS``, takes 1.3 times as long.
    """

    __slots__ = ("_tiles",)

    def __init__(self, weight: Tensor, *, dtype: torch.dtype, device: torch.device) -> None:
        num_outputs, num_inputs = weight.shape
        tile = _tile_size(num_outputs) if device.type == "cpu" else num_outputs
        tiles = weight.view(-1, tile, num_inputs).transpose(1, 2)
        self._tiles = tiles.to(device=device, dtype=dtype).contiguous()

    def __call__(self, rows: Tensor) -> Tensor:
        """``[num_rows, in]`` to ``[num_rows, out]``."""
        num_tiles, num_inputs, tile = self._tiles.shape
        num_rows = rows.shape[0]
        tiled = torch.bmm(rows.expand(num_tiles, num_rows, num_inputs), self._tiles)
        return tiled.transpose(0, 1).reshape(num_rows, num_tiles * tile)

    def weight_rows(self, indices: Tensor) -> Tensor:
        """``weight[indices]``, ``[num_indices, in]``: a tied head looks its embeddings up here."""
        tile = self._tiles.shape[2]
        return self._tiles[indices // tile, :, indices % tile]


def _tile_size(num_outputs: int) -> int:
    """The widest divisor that keeps a tile in cache; all outputs where none does."""
    for size in range(_MAX_TILE, _MIN_TILE - 1, -1):
        if num_outputs % size == 0:
            return size
    return num_outputs


class RmsNorm:
    """Each row over the root of its mean square, times a learned scale."""

    __slots__ = ("_eps", "_scale")

    def __init__(
        self, scale: Tensor, *, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._scale = scale.to(device=device, dtype=dtype)
        self._eps = eps

    def __call__(self, rows: Tensor) -> Tensor:
        """``[num_rows, hidden]`` to the same shape."""
        return functional.rms_norm(rows, self._scale.shape, self._scale, self._eps)


class RotaryEmbedding:
    """Turns each pair of a head's dimensions by an angle proportional to the token's position.

    A pair is two neighbours, so that a head is a row of complex numbers and the turn one multiplication in place.
    Checkpoints pair dimension ``i`` with ``i + head_dim / 2``; ``pair_neighbours`` reorders their projections once,
    and no dot product of a query and a key changes.

    Source: Su et al. (2021), arXiv:2104.09864, equation 34.
    """

    __slots__ = ("_turns",)

    def __init__(self, model: ModelConfig, *, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(model))
        # A table, because its entries must not depend on how many positions a step looks up.
        self._turns = torch.polar(torch.ones_like(angles), angles).to(device)

    def turns(self, positions: Tensor) -> Tensor:
        """What ``rotate_`` multiplies by: ``[num_tokens, 1, head_dim / 2]``, complex."""
        return self._turns[positions].unsqueeze(1)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Turn float32 ``heads`` ``[num_tokens, num_heads, head_dim]`` in place."""
    torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2)).mul_(turns)


def pair_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key projection ``[heads * head_dim, in]``, each pair of rotary dimensions made neighbours."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """Radians per position of each pair, ``[head_dim / 2]`` in float32, stretched as the model asks."""
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequencies = 1.0 / model.rope_theta**exponents
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _stretch_low_frequencies(frequencies, scaling)


def _stretch_low_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Waves that fit often into the trained context stay, those that do not fit are stretched, with a ramp between.

    Source: Llama 3.1, models/llama3/reference_impl/model.py, ``apply_scaling``.
    """
    turns_in_context = scaling.original_context_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
