"""Plans for versions and for this machine, in the names that every face uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.registry.plans import PlanRefused, plan
from inference.calibration import CALIBRATION, write_calibration
from tests.controlplane.small_artifact import NUM_PARAMETERS, make_planned_version
from tests.factories import make_version
from tests.inference.planner import reference

SIZES = {"params": 7e9, "num_layers": 32, "hidden_size": 4096}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> Path:
    """A home in which nothing was measured yet."""
    settings.TATKAL_HOME = tmp_path
    return tmp_path


def test_sizes_are_enough() -> None:
    answer = plan({"hardware": "a100-40gb", **SIZES, "version": None})
    assert answer.plan.sequences == 26
    assert answer.to_dict()["model"]["num_kv_heads"] == 32


@pytest.mark.django_db
def test_a_version_is_read_from_its_artifact(tmp_path: Path) -> None:
    version = make_planned_version(tmp_path)
    answer = plan({"hardware": "l4", "version": version.name})
    question = answer.question
    assert (question.weights, question.kv, question.context) == ("bf16", "bf16", 2048)
    # 22 layers, 4 key heads of 64, keys and values, 2 bytes.
    assert answer.plan.kv_bytes_per_token == 22 * 2 * 4 * 64 * 2
    rotary = 2048 * 32 * 8
    assert answer.plan.weight_bytes == pytest.approx(2 * NUM_PARAMETERS + rotary, rel=1e-3)
    assert question.shape.lookup_params == 32_000 * 2048


@pytest.mark.django_db
def test_engine_options_of_a_version_count(tmp_path: Path) -> None:
    version = make_planned_version(
        tmp_path, engine_options={"max_model_len": 512, "dtype": "float32"}
    )
    question = plan({"hardware": "l4", "version": version.name}).question
    assert (question.weights, question.kv, question.context) == ("fp32", "fp32", 512)


@pytest.mark.django_db
def test_other_weights_of_a_version_have_the_size_of_their_format(tmp_path: Path) -> None:
    version = make_planned_version(tmp_path)
    answer = plan({"hardware": "l4", "version": version.name, "weights": "int4"})
    assert answer.plan.weight_bytes == NUM_PARAMETERS / 2


def test_this_machine_is_known_once_it_was_measured(home: Path) -> None:
    with pytest.raises(PlanRefused, match="--calibrate"):
        plan({"hardware": "this-machine", **SIZES})
    write_calibration(home, reference.CALIBRATION)
    assert plan({"hardware": "this-machine", **SIZES}).plan.ridge == 5
    (home / CALIBRATION).write_text("{")
    with pytest.raises(PlanRefused, match="Delete it"):
        plan({"hardware": "this-machine", **SIZES})


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ({}, "hardware"),
        ({"hardware": "a1"}, "hardware"),
        ({"hardware": "l4", "params": 7e9}, "num_layers"),
        ({"hardware": "l4", **SIZES, "weights": "fp5"}, "weights"),
        ({"hardware": "l4", **SIZES, "rate": 1.0}, "ttft_s"),
        ({"hardware": "l4", "version": "tiny/9"}, "version"),
        ({"hardware": "l4", "version": "tiny/1", "params": 7e9}, "params"),
        ({"hardware": "l4", "version": "tiny/1"}, "version"),
    ],
)
def test_what_cannot_be_planned_is_named(inputs: dict[str, Any], name: str) -> None:
    make_version()  # tiny/1, whose artifact is not on this machine
    with pytest.raises(PlanRefused) as refusal:
        plan(inputs)
    assert refusal.value.status == 400
    assert list(refusal.value.details["errors"]) == [name]


@pytest.mark.django_db
def test_a_version_that_is_not_ready_is_not_planned() -> None:
    with pytest.raises(PlanRefused, match="is pending; wait"):
        plan({"hardware": "l4", "version": make_version(state="pending").name})
