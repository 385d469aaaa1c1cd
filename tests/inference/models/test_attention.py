"""Paged attention against torch's own attention over dense keys, and its independence of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inference.models.attention import AttentionBatch, AttentionShape, Span, attend, write_kv

CPU = torch.device("cpu")
SHAPES = [
    AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=12, block_size=4),
    AttentionShape(num_heads=8, num_kv_heads=1, head_dim=80, block_size=1),
    AttentionShape(num_heads=2, num_kv_heads=1, head_dim=128, block_size=128),
    AttentionShape(num_heads=2, num_kv_heads=2, head_dim=256, block_size=8),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class _Sequences:
    """Random sequences with queries, keys and values, and a cache in which their blocks lie scattered."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int]) -> None:
        self.shape = shape
        self.queries = [torch.randn(n, shape.num_heads, shape.head_dim) for n in lengths]
        self.keys_values = [torch.randn(n, 2 * shape.num_kv_heads, shape.head_dim) for n in lengths]
        sizes = [-(-n // shape.block_size) for n in lengths]
        blocks = torch.split(torch.randperm(sum(sizes)) + 1, sizes)
        self.tables = [each.tolist() for each in blocks]
        self.cache = torch.zeros(
            sum(sizes) + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim
        )

    def run(self, rows: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Answers of one step in which sequence ``index`` computes positions ``start`` to ``end``."""
        spans = [Span(start, end - start, self.tables[index]) for index, start, end in rows]
        batch = AttentionBatch.from_spans(self.shape, spans, CPU)
        keys_values = torch.cat([self.keys_values[index][a:b] for index, a, b in rows])
        write_kv(self.cache, keys_values, batch)
        queries = torch.cat([self.queries[index][a:b] for index, a, b in rows])
        answers = attend(self.cache, queries, batch)
        return list(torch.split(answers, [b - a for _, a, b in rows]))

    def expected(self, index: int) -> Tensor:
        keys, values = self.keys_values[index].transpose(0, 1).chunk(2)
        answers = functional.scaled_dot_product_attention(
            self.queries[index].transpose(0, 1)[None],
            keys[None],
            values[None],
            is_causal=True,
            enable_gqa=True,
        )
        return answers[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_and_decodes_in_one_step_equal_dense_attention(shape: AttentionShape) -> None:
    sequences = _Sequences(shape, [300, 2, 129, 1, 128, 40])
    first = sequences.run([(0, 0, 200), (2, 0, 128), (4, 0, 127), (5, 0, 7)])
    second = sequences.run(
        [(4, 127, 128), (0, 200, 300), (3, 0, 1), (1, 0, 2), (2, 128, 129), (5, 7, 40)]
    )
    answers = [
        torch.cat([first[0], second[1]]),
        second[3],
        torch.cat([first[1], second[4]]),
        second[2],
        torch.cat([first[2], second[0]]),
        torch.cat([first[3], second[5]]),
    ]
    for index, answer in enumerate(answers):
        torch.testing.assert_close(answer, sequences.expected(index), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_bit_depends_on_the_batch_or_on_the_chunks(
    shape: AttentionShape, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    sequences = _Sequences(shape, [300, 290, 5, 140, 65])
    [whole] = sequences.run([(0, 0, 300)])
    for index in range(1, 5):
        sequences.run([(index, 0, len(sequences.queries[index]))])

    mates = [(1, 289, 290), (2, 4, 5), (3, 100, 140), (4, 64, 65)]
    for at in (0, 1, 7, 127, 128, 129, 255, 256, 299):
        answer = sequences.run([*mates, (0, at, at + 1)])[-1]
        assert torch.equal(answer[0], whole[at])
    for chunk in (19, 100):
        parts = [
            sequences.run([*mates, (0, at, min(at + chunk, 300))])[-1]
            for at in range(0, 300, chunk)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_no_bit_depends_on_how_far_a_longer_neighbour_reaches() -> None:
    # Both decode in one tile, which is then wider than the first needs: 896 keys instead of 512 or 640.
    sequences = _Sequences(SHAPES[0], [600, 896])
    for index, length in enumerate((600, 896)):
        sequences.run([(index, 0, length)])
    for at in (499, 511, 550, 599):
        [alone] = sequences.run([(0, at, at + 1)])
        [together, _] = sequences.run([(0, at, at + 1), (1, 895, 896)])
        assert torch.equal(together, alone)


def test_what_lies_behind_the_last_key_is_not_seen() -> None:
    sequences = _Sequences(SHAPES[0], [20])
    sequences.run([(0, 0, 19)])
    before = sequences.cache.clone()
    [expected] = sequences.run([(0, 19, 20)])

    sequences.cache = before
    unwritten = sequences.cache[sequences.tables[0][1], :, :, 4:]
    unwritten.fill_(1e6)
    [answer] = sequences.run([(0, 19, 20)])
    assert torch.equal(answer, expected)


def test_only_the_blocks_that_begin_now_are_named() -> None:
    spans = [Span(0, 17, [5, 9]), Span(31, 1, [1, 2]), Span(32, 1, [3, 4, 7])]
    batch = AttentionBatch.from_spans(SHAPES[0], spans, CPU)
    assert batch.first_blocks.tolist() == [5, 9, 7]
    assert batch.num_tokens == 19
