"""The reference figures, each as it is published, and what a plan says when something cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from inference.planner.hardware import DEVICES
from inference.planner.plan import make_plan
from inference.planner.queueing import Load
from inference.planner.shape import InvalidPlan, ModelShape
from tests.inference.planner.reference import A100, SEVEN_B, ask


def test_an_a100_turns_compute_bound_at_200_6_flop_per_byte() -> None:
    assert round(make_plan(ask()).ridge, 1) == 200.6


@pytest.mark.parametrize(("weights", "milliseconds"), [("fp16", 9.00), ("int4", 2.25)])
def test_a_decode_step_takes_9_0_ms_in_fp16_and_2_25_ms_in_int4(
    weights: str, milliseconds: float
) -> None:
    assert round(make_plan(ask(weights=weights)).decode_floor_s * 1e3, 2) == milliseconds


def test_a_token_takes_524_288_bytes_of_keys_and_values() -> None:
    assert make_plan(ask()).kv_bytes_per_token == 524_288


@pytest.mark.parametrize(("weights", "gigabytes"), [("fp16", 28.95), ("int4", 39.45)])
def test_28_95_gb_are_free_beside_fp16_and_39_45_beside_int4(
    weights: str, gigabytes: float
) -> None:
    """40 GiB of memory, and 14 or 3.5 GB of weights; what is free is told in units of 10^9 bytes."""
    assert round(make_plan(ask(weights=weights)).free_bytes / 1e9, 2) == gigabytes


@pytest.mark.parametrize(
    ("weights", "context", "sequences"),
    [("fp16", 2048, 26), ("fp16", 4096, 13), ("int4", 2048, 36), ("int4", 4096, 18)],
)
def test_26_and_13_sequences_fit_in_fp16_and_36_and_18_in_int4(
    weights: str, context: int, sequences: int
) -> None:
    assert make_plan(ask(weights=weights, context=context)).sequences == sequences


def test_a_static_batch_of_4_10_14_and_16_wastes_20_of_64_slot_steps() -> None:
    batching = make_plan(ask(lengths=(4, 10, 14, 16))).batching
    assert (batching.wasted_slot_steps, batching.held_slot_steps) == (20, 64)
    assert batching.waste == 0.3125


def test_headroom_and_grouped_keys_move_the_number_of_sequences() -> None:
    sequences = make_plan(ask()).sequences
    assert make_plan(ask(headroom=0.2)).sequences < sequences
    grouped = replace(SEVEN_B, num_kv_heads=8)
    assert make_plan(ask(shape=grouped)).kv_bytes_per_token == 524_288 // 4
    assert make_plan(ask(shape=grouped)).sequences > 3.9 * sequences


def test_a_standby_costs_its_weights_and_a_floor_of_blocks() -> None:
    plan = make_plan(ask(with_standby=True))
    assert plan.standby is not None
    # 14 GB of weights, and one sequence of 512 tokens with the null block: 33 blocks of 8 MiB.
    assert plan.standby.num_bytes == 14e9 + 33 * 8 * 2**20
    assert plan.standby.sequences == 26 - 13
    assert plan.candidate is not None
    assert plan.candidate.sequences > plan.standby.sequences


def test_a_candidate_that_answers_everything_leaves_half_of_what_is_left() -> None:
    candidate = make_plan(ask(weights="int4", with_standby=True)).candidate
    assert candidate is not None
    # 42.95 - 7.0 = 35.95 GB for two caches; 17.97 GB hold 16 sequences.
    assert (candidate.sequences_left, candidate.sequences) == (16, 20)


def test_the_what_ifs_have_every_format_at_every_context() -> None:
    rows = {(row.weights, row.context): row.sequences for row in make_plan(ask()).what_ifs}
    assert rows["fp16", 2048] == 26
    assert rows["int4", 4096] == 18
    assert len(rows) == 9


def test_weights_that_exist_are_taken_as_they_are_in_their_own_format_alone() -> None:
    shape = replace(SEVEN_B, weight_bytes=5_000_000_000)
    plan = make_plan(ask(shape=shape, weights="int4"))
    assert plan.weight_bytes == 5e9
    sizes = {row.weights: row.weight_bytes for row in plan.what_ifs}
    assert sizes == {"fp16": 14e9, "int8": 7e9, "int4": 5e9}


def test_scales_of_groups_are_counted_where_they_are_asked_for() -> None:
    assert make_plan(ask(weights="int4", group_size=32)).weight_bytes == 7e9 * 5 / 8
    assert make_plan(ask(weights="int8", group_size=32)).weight_bytes == 7e9 * 8.5 / 8


def test_a_model_that_does_not_fit_is_told_by_how_much() -> None:
    plan = make_plan(ask(device=DEVICES["l4"], shape=replace(SEVEN_B, params=13e9)))
    assert (plan.sequences, plan.tokens_per_s, plan.cost) == (0, None, None)
    # 26 GB of weights and 129 blocks of 8 MiB, less 24 GiB.
    assert "1.31 GB are missing" in plan.notes[0]


def test_a_batch_beyond_what_fits_is_told() -> None:
    assert "Only 26 sequences fit" in make_plan(ask(batch=27)).notes[0]


def test_weights_smaller_than_the_last_level_cache_are_told() -> None:
    small = ask(device=replace(A100, cache_bytes=15 * 10**9))
    assert "14,000 MB) fit into the last-level cache of this machine (15,000 MB)" in "".join(
        make_plan(small).notes
    )
    assert "held in part" in "".join(
        make_plan(ask(device=replace(A100, cache_bytes=8 * 10**9))).notes
    )
    assert "cache" not in "".join(make_plan(ask()).notes)


def test_a_plan_is_json_with_its_device_and_source() -> None:
    question = ask(price_per_hour=2.0, load=Load(1, 512, 128, 1.0, 0.05))
    data = json.loads(json.dumps(make_plan(question).to_dict(question)))
    assert data["hardware"]["bandwidth_bytes_per_s"] == 1555e9
    assert data["hardware"]["source"].startswith("NVIDIA A100 Tensor Core GPU Architecture")
    assert data["service"]["replicas"] == 1
    assert data["queue_model"].startswith("M/G/c")
    assert data["cost"]["per_1k_tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"headroom": 0.21}, "headroom"),
        ({"context": 0}, "context"),
        ({"block_size": 0}, "block_size"),
        ({"weights": "fp5"}, "weights"),
        ({"kv": "int4"}, "kv"),
        ({"price_per_hour": float("nan")}, "price_per_hour"),
        ({"batch": -1}, "batch"),
    ],
)
def test_a_value_that_cannot_be_is_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidPlan) as refusal:
        ask(**changes)
    assert refusal.value.name == name
    assert f"{name}=" in str(refusal.value)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"num_kv_heads": 5}, "num_kv_heads"),
        ({"num_heads": 33}, "num_heads"),
        ({"hidden_size": 4100}, "head_dim"),
        ({"params": 0}, "params"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": 10**400}, "num_layers"),
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_sizes_that_cannot_be_are_named(sizes: dict[str, Any], name: str) -> None:
    values = {"params": 7e9, "num_layers": 32, "hidden_size": 4096, **sizes}
    with pytest.raises(InvalidPlan) as refusal:
        ModelShape.of_sizes(**values)
    assert refusal.value.name == name
