"""The real engine for artifacts that are tiny, the instant one for the demo's: bad versions beside a cheap live one."""

from __future__ import annotations

import pkgutil

from inference.artifact import read_manifest
from inference.config import EngineConfig
from inference.slot.loading import SlotEngine
from tests.inference import instant_engine

TINY_PARAMETERS = 10**7


def load(config: EngineConfig) -> SlotEngine:
    """For ``TATKAL_ENGINE``; torch is imported where the real engine is needed."""
    if read_manifest(config.artifact).num_parameters > TINY_PARAMETERS:
        return instant_engine.load(config)
    engine: SlotEngine = pkgutil.resolve_name("inference.engine.llm_engine:LLMEngine.load")(config)
    return engine
