"""The instant engine of a bad candidate: the word ``fragile`` ends its process, and no other version's."""

from __future__ import annotations

from inference.config import EngineConfig
from inference.protocol import GenerateRequest
from tests.inference import instant_engine
from tests.inference.instant_engine import WORDS, InstantEngine


class FragileEngine(InstantEngine):
    """Dies in the first step of a request that holds the word."""

    def encode(self, request: GenerateRequest) -> tuple[int, ...]:
        """As the instant engine does, with a fault of its own."""
        text = request.prompt or ""
        faults = (-1 - WORDS.index("die"),) if "fragile" in text else ()
        return (*faults, *super().encode(request))


def load(config: EngineConfig) -> FragileEngine:
    """For ``TATKAL_ENGINE``."""
    plain = instant_engine.load(config)
    engine = FragileEngine(step_s=0.005, fingerprint="fragile")
    engine.num_blocks = plain.num_blocks
    return engine
