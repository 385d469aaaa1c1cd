"""A setting that cannot work is refused with its name and value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference.config import EngineConfig, InvalidConfig, ModelConfig, RopeScaling

MODEL = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=256,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    eos_token_ids=(2, 5),
    rope_scaling=RopeScaling("llama3", 8.0),
)


def test_a_model_config_survives_its_dictionary() -> None:
    assert ModelConfig.from_dict(MODEL.to_dict()) == MODEL


def test_an_unknown_field_of_a_model_config_is_named() -> None:
    with pytest.raises(InvalidConfig, match="sliding_window"):
        ModelConfig.from_dict({**MODEL.to_dict(), "sliding_window": 4})


def test_a_missing_field_of_a_model_config_is_named() -> None:
    data = MODEL.to_dict()
    del data["head_dim"]

    with pytest.raises(InvalidConfig, match="head_dim"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_layers", 0, "num_layers=0"),
        ("num_kv_heads", 3, "num_kv_heads=3"),
        ("head_dim", 15, "head_dim=15"),
    ],
)
def test_an_impossible_shape_is_refused(name: str, value: int, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        replace(MODEL, **{name: value})  # type: ignore[arg-type]


def test_an_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="dynamic"):
        RopeScaling("dynamic", 2.0)


def test_engine_settings_come_from_the_environment() -> None:
    config = EngineConfig.from_env(
        {"TATKAL_ENGINE_BLOCK_SIZE": "32", "TATKAL_ENGINE_DTYPE": "float32"}, artifact=Path("a")
    )

    assert (config.block_size, config.dtype) == (32, "float32")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TATKAL_ENGINE_BLOCK_SIZE": "many"}, "TATKAL_ENGINE_BLOCK_SIZE='many'"),
        ({"TATKAL_ENGINE_BLOCK_SIZE": "0"}, "block_size=0"),
        ({"TATKAL_ENGINE_DTYPE": "int3"}, "dtype='int3'"),
        ({"TATKAL_ENGINE_DEVICE": "tpu"}, "device='tpu'"),
        ({"TATKAL_ENGINE_KERNEL": "fast"}, "kernel='fast'"),
        ({"TATKAL_ENGINE_BLOCK_SIZE": "12"}, "block_size=12 must be a power of two"),
        ({"TATKAL_ENGINE_NUM_BLOCKS": "-1"}, "num_blocks=-1"),
        ({"TATKAL_ENGINE_MAX_NUM_BATCHED_TOKENS": "8"}, "max_num_batched_tokens=8"),
    ],
)
def test_a_malformed_engine_setting_is_named(env: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        EngineConfig.from_env(env, artifact=Path("a"))


def test_a_versions_own_options_win_over_the_machines() -> None:
    config = EngineConfig(artifact=Path("a")).with_options({"dtype": "float32"})

    assert config.dtype == "float32"


def test_an_unknown_engine_option_is_named() -> None:
    with pytest.raises(InvalidConfig, match="blok_size"):
        EngineConfig(artifact=Path("a")).with_options({"blok_size": 16})
