"""Time and cost on the roof: published points, and what must hold for any model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.planner.hardware import DEVICES, THIS_MACHINE, Calibration, find_device
from inference.planner.roofline import (
    Roofline,
    batch_intensity,
    cost_per_1k_tokens,
    cost_per_query,
)
from inference.planner.shape import InvalidPlan, ModelShape
from tests.inference.planner.reference import A100, CALIBRATION, SEVEN_B

REFERENCE = Roofline(A100, SEVEN_B, "fp16", "fp16")


def test_the_intensity_of_a_batch_is_2b_over_d() -> None:
    assert [batch_intensity(8, weights) for weights in ("fp16", "int8", "int4")] == [8, 16, 32]


def test_without_keys_and_values_decode_turns_where_2b_over_d_meets_the_ridge() -> None:
    assert REFERENCE.weights_bound_batch() == pytest.approx(200.64, abs=0.01)
    assert replace(REFERENCE, weights="int4").weights_bound_batch() == pytest.approx(
        50.16, abs=0.01
    )


def test_with_a_short_context_the_turn_comes_later_and_with_a_long_one_never() -> None:
    batch = REFERENCE.compute_bound_batch(32)
    assert batch is not None
    assert batch > 200
    for side, is_bound in ((batch - 1, False), (batch, True)):
        work = REFERENCE.decode_work(side, 32)
        assert (work.intensity >= REFERENCE.ridge) is is_bound
    assert REFERENCE.compute_bound_batch(2048) is None


def test_flops_of_a_token_are_two_per_weight_and_those_of_attention() -> None:
    """Kaplan et al. (2020), equation 2.2: 2N + 2 n_layer n_ctx d_attn, where n_ctx / 2 tokens are seen on average."""
    num_tokens = 1000
    per_token = REFERENCE.prefill_work(num_tokens).flops / num_tokens
    assert per_token == 2 * 7e9 + 2 * 32 * num_tokens * 4096


def test_an_embedding_that_is_only_looked_up_is_neither_read_nor_multiplied() -> None:
    shape = ModelShape(8e9, 32, 4096, 32, 8, 128, lookup_params=1e9)
    roof = Roofline(A100, shape, "fp16", "fp16")
    assert roof.streamed_bytes == 14e9
    assert roof.token_flops(0) == 14e9


@given(
    batch=st.integers(1, 4096),
    context=st.integers(1, 100_000),
    device=st.sampled_from(sorted(DEVICES)),
    weights=st.sampled_from(["fp16", "int8", "int4"]),
)
def test_no_step_is_faster_than_its_floor_nor_any_rate_above_its_roof(
    batch: int, context: int, device: str, weights: str
) -> None:
    roof = Roofline(DEVICES[device], SEVEN_B, weights, "fp16")
    work, seconds = roof.decode_work(batch, context), roof.decode_s(batch, context)
    assert seconds >= roof.decode_floor_s()
    assert work.flops / seconds <= roof.device.flops * (1 + 1e-9)
    assert work.num_bytes / seconds <= roof.device.bandwidth * (1 + 1e-9)
    assert roof.tokens_per_s(batch + 1, context) >= roof.tokens_per_s(batch, context) * (1 - 1e-9)


def test_a_thousand_tokens_cost_their_share_of_an_hour() -> None:
    # 3.60 an hour is 0.001 a second; 500 tokens a second make 1,000 in two.
    assert cost_per_1k_tokens(3.6, 500) == pytest.approx(0.002)


def test_a_query_costs_its_prompt_alone_and_its_share_of_the_steps() -> None:
    cost = cost_per_query(
        REFERENCE, price_per_hour=3600, prompt_tokens=512, output_tokens=100, batch=10
    )
    step_s = REFERENCE.decode_s(10, 562)
    assert cost == pytest.approx(REFERENCE.prefill_s(512) + 100 * step_s / 10)
    alone = cost_per_query(
        REFERENCE, price_per_hour=3600, prompt_tokens=512, output_tokens=100, batch=1
    )
    assert alone > cost


def test_every_device_has_a_source_and_an_order_of_magnitude() -> None:
    assert set(DEVICES) == {
        "a100-40gb", "a100-80gb", "h100", "h200", "l4", "l40s", "rtx-4090", "mi300x",
    }  # fmt: skip
    for device in DEVICES.values():
        assert "https://" in device.source
        assert 100 < device.ridge() < 500
        assert device.int8_ops >= 2 * device.flops


def test_a_calibrated_machine_multiplies_each_format_as_it_was_measured() -> None:
    machine = find_device(THIS_MACHINE, CALIBRATION)
    assert [machine.rate(weights) for weights in ("bf16", "fp16", "int4")] == [100e9, 100e9, 240e9]
    assert machine.ridge("int4") == 12
    assert Calibration.from_dict(CALIBRATION.to_dict()) == CALIBRATION


def test_a_calibration_of_a_busy_machine_says_so() -> None:
    assert CALIBRATION.note == ""
    assert "too low" in replace(CALIBRATION, load=3.0).note


@pytest.mark.parametrize(
    "damage",
    [{"bandwidth": 0.0}, {"flops": {}}, {"flops": {"bf16": -1.0}}, {"flops": None}, {"memory_bytes": 0}],
)  # fmt: skip
def test_a_damaged_calibration_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(InvalidPlan, match="--calibrate"):
        Calibration.from_dict(CALIBRATION.to_dict() | damage)


def test_an_unknown_or_unmeasured_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidPlan, match=r"a100-40gb, .*this-machine"):
        find_device("a1000")
    with pytest.raises(InvalidPlan, match="--calibrate"):
        find_device(THIS_MACHINE)
