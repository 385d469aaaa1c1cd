"""The script for a lent device, with tiny models on the CPU: what it prints adds up."""

from __future__ import annotations

import pytest
import torch

from tests.bench.gpu import BATCHES, KINDS, TINY, Setting, measure_kind, model_of

CPU = Setting(torch.device("cpu"), is_quick=True)


@pytest.mark.slow
def test_each_kind_has_a_figure_for_each_batch_and_one_without_graphs() -> None:
    torch.set_num_threads(1)
    figures = {kind: list(measure_kind(CPU, kind, 1e9)) for kind in KINDS}
    for kind, rows in figures.items():
        assert [row.batch for row in rows] == [*BATCHES, 1]
        assert [row.kernel.endswith("int4") for row in rows] == [kind == "int4"] * 4
        for row in rows:
            assert row.tokens_per_s == pytest.approx(1e3 * row.batch / row.step_ms)
            assert row.bandwidth_fraction == pytest.approx(row.step_bytes / row.step_ms / 1e6)


@pytest.mark.slow
def test_a_step_reads_each_weight_once_and_the_context_of_each_sequence() -> None:
    torch.set_num_threads(1)
    rows = list(measure_kind(CPU, "bf16", 1e9))
    model = model_of(TINY)
    width = model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    layer = model.hidden_size * (width + 3 * model.intermediate_size)
    weights = 2 * (model.num_layers * layer + model.vocab_size * model.hidden_size)
    context = 512 * model.num_layers * 2 * model.num_kv_heads * model.head_dim * 2
    assert rows[0].step_bytes == weights + context
    assert rows[1].step_bytes == weights + 8 * context
