"""A slot's settings: what is malformed is named."""

from __future__ import annotations

import pytest

from inference.config import InvalidConfig
from inference.slot.config import SlotConfig


def test_a_slot_reads_its_settings() -> None:
    env = {"TATKAL_SLOT": "slot-1", "REDIS_URL": "redis://x", "TATKAL_YIELD_S": "3"}
    config = SlotConfig.from_env(env | {"TATKAL_ENGINE": "module:load"})
    assert (config.slot, config.engine, config.yield_s) == ("slot-1", "module:load", 3)
    assert config.lease_ms == SlotConfig("slot-1", "redis://x").lease_ms


def test_slots_that_share_an_environment_have_ports_of_their_own() -> None:
    env = {"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_METRICS_PORT": "9100"}
    assert SlotConfig.from_env(env | {"TATKAL_SLOT_INDEX": "2"}).metrics_port == 9102
    assert SlotConfig.from_env(env).metrics_port == 9100
    off = env | {"TATKAL_METRICS_PORT": "0", "TATKAL_SLOT_INDEX": "2"}
    assert SlotConfig.from_env(off).metrics_port == 0


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({}, "TATKAL_SLOT"),
        ({"TATKAL_SLOT": "slot 1", "REDIS_URL": "redis://x"}, "TATKAL_SLOT"),
        ({"TATKAL_SLOT": "slot-1"}, "REDIS_URL"),
        (
            {"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_LEASE_MS": "fast"},
            "TATKAL_LEASE_MS",
        ),
        ({"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_STALL_S": "0"}, "TATKAL_STALL_S"),
        (
            {"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_METRICS_PORT": "70000"},
            "TATKAL_METRICS_PORT",
        ),
        (
            {"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_ENGINE_BLOCK_SIZE": "many"},
            "TATKAL_ENGINE_BLOCK_SIZE",
        ),
    ],
)
def test_a_malformed_setting_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        SlotConfig.from_env(env)
