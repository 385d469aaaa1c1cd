"""Layers against the formulas of torch, and the promise that a row's bits do not depend on its neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from inference.config import ModelConfig, RopeScaling
from inference.models.layers import (
    MIN_ROWS,
    Linear,
    RmsNorm,
    RotaryEmbedding,
    pair_neighbours,
    rotary_frequencies,
    rotate_,
)

CPU = torch.device("cpu")
SIZES = [(960, 576), (576, 1536), (1031, 48), (48, 12), (64, 8)]
NUM_ROWS = [MIN_ROWS, 5, 8, 15, 16, 17, 33, 64, 100, 300]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _model(**shape: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "context_length": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "eos_token_ids": (1,),
    }
    return ModelConfig(**{**fields, **shape})


@pytest.mark.parametrize("size", SIZES)
def test_a_linear_map_is_the_product_with_the_transposed_weight(size: tuple[int, int]) -> None:
    weight = torch.randn(size)
    rows = torch.randn(9, size[1])
    linear = Linear(weight, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(linear(rows), functional.linear(rows, weight), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", SIZES)
def test_no_bit_of_a_linear_map_depends_on_the_number_of_rows(
    size: tuple[int, int], num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    linear = Linear(torch.randn(size), dtype=torch.float32, device=CPU)
    rows = torch.randn(max(NUM_ROWS), size[1])
    whole = linear(rows)
    for count in NUM_ROWS:
        assert torch.equal(linear(rows[:count]), whole[:count])
        assert torch.equal(linear(rows[-count:]), whole[-count:])


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_the_weight_can_be_looked_up(size: tuple[int, int]) -> None:
    weight = torch.randn(size)
    indices = torch.tensor([0, size[0] - 1, size[0] // 2, 0])
    rows = Linear(weight, dtype=torch.float32, device=CPU).weight_rows(indices)
    assert torch.equal(rows, weight[indices])


def test_no_row_at_all_gives_no_row() -> None:
    linear = Linear(torch.randn(960, 576), dtype=torch.float32, device=CPU)
    assert linear(torch.empty(0, 576)).shape == (0, 960)


def test_a_norm_divides_by_the_root_of_the_mean_square() -> None:
    scale, rows = torch.randn(576), torch.randn(300, 576)
    norm = RmsNorm(scale, eps=1e-5, dtype=torch.float32, device=CPU)
    mean_square = rows.double().square().mean(-1, keepdim=True)
    expected = rows.double() / (mean_square + 1e-5).sqrt() * scale
    torch.testing.assert_close(norm(rows).double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(norm(rows[:4]), norm(rows)[:4])


@pytest.mark.parametrize("head_dim", [2, 8, 12, 80])
def test_a_head_is_turned_as_the_checkpoint_means_it(head_dim: int) -> None:
    model = _model(head_dim=head_dim)
    weight, hidden = torch.randn(3 * head_dim, 8), torch.randn(5, 8)
    positions = torch.tensor([0, 1, 2, 40, 63])

    heads = functional.linear(hidden, pair_neighbours(weight, head_dim)).view(5, 3, head_dim)
    rotate_(heads, RotaryEmbedding(model, num_positions=64, device=CPU).turns(positions))

    # The definition in the layout of checkpoints: dimension i is paired with i + head_dim / 2.
    plain = functional.linear(hidden, weight).view(5, 3, head_dim)
    angles = positions[:, None, None] * rotary_frequencies(model)
    first, second = plain.chunk(2, dim=-1)
    expected = torch.stack(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    ).flatten(-2)
    torch.testing.assert_close(heads, expected, atol=1e-5, rtol=1e-5)


def test_a_turned_query_and_key_see_their_distance_alone() -> None:
    turns = RotaryEmbedding(_model(), num_positions=64, device=CPU).turns(torch.arange(64))
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    queries, keys = query.repeat(64, 1, 1), key.repeat(64, 1, 1)
    rotate_(queries, turns)
    rotate_(keys, turns)
    products = (queries[3:] * keys[:-3]).sum(-1)
    torch.testing.assert_close(products, products[:1].expand_as(products), atol=1e-4, rtol=0)


def test_linear_scaling_divides_every_frequency() -> None:
    scaled = rotary_frequencies(_model(rope_scaling=RopeScaling("linear", 4.0)))
    assert torch.equal(scaled, rotary_frequencies(_model()) / 4)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RopeScaling("llama3", 8.0, original_context_length=8192)
    plain = rotary_frequencies(_model(head_dim=128, rope_theta=500_000.0))
    scaled = rotary_frequencies(_model(head_dim=128, rope_theta=500_000.0, rope_scaling=scaling))
    ratio = plain / scaled
    assert torch.equal(ratio[:29], torch.ones(29))
    torch.testing.assert_close(ratio[35:], torch.full((29,), 8.0))
    assert (ratio[29:35].diff() > 0).all()
