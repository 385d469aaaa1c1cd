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
            {"TATKAL_SLOT": "s", "REDIS_URL": "redis://x", "TATKAL_ENGINE_BLOCK_SIZE": "many"},
            "TATKAL_ENGINE_BLOCK_SIZE",
        ),
    ],
)
def test_a_malformed_setting_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        SlotConfig.from_env(env)
