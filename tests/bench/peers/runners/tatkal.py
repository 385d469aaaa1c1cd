"""The engine of this repository, as it is: scheduler, sampler and detokenizer included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from tests.bench.peers.runners.wire import Reply, Request, Setup, serve
from tests.bench.traffic import Asked, drive


class Tatkal:
    """One artifact."""

    def __init__(self, setup: Setup) -> None:
        config = EngineConfig(
            Path(setup.artifact),
            num_threads=setup.num_threads,
            max_num_seqs=setup.num_requests,
        )
        self._engine = LLMEngine.load(config)
        self._engine.warm_up()
        self.about = self._engine.kernel

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """As ``Engine.run``."""
        asked = [Asked(tuple(each.prompt), each.num_tokens) for each in requests]
        answers = drive(self._engine, asked)
        return [Reply(each.token_ids, each.first_s, each.last_s) for each in answers]


if __name__ == "__main__":
    serve(Tatkal)
