"""A loop with requests and copies, on a real Redis: the candidate's slot, and the hands of a gateway."""

from __future__ import annotations

import threading
from typing import Any

from inference.engine.contract import Engine
from inference.engine.copy_intake import CopyIntake
from inference.engine.intake import Intake
from inference.engine.loop import EngineLoop
from inference.protocol import Answer, GenerateRequest, SamplingParams
from tests.inference.engine.loop_bench import LANE, Bench, run_body
from tests.inference.instant_engine import InstantEngine
from tests.inference.slot_process import wait_until


class CopyBench(Bench):
    """The slot of this test holds the live version, which is asked for copies as well."""

    def start_with(self, engine: Engine) -> None:
        """Start loop and intakes around ``engine``."""
        self.loop = EngineLoop(engine, self.queue, LANE, self.member)
        self.intake = Intake(self.loop, engine, self.queue, LANE, self.member)
        self.copy_intake = CopyIntake(self.loop, engine, self.queue, LANE, self.member)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        self.intake.start(run_body)
        self.copy_intake.start(run_body)

    def start_instant(self, **settings: Any) -> InstantEngine:
        self.engine = InstantEngine(**settings)
        self.engine.num_blocks = 1_000
        self.start_with(self.engine)
        return self.engine

    def stop(self, drain_s: float = 0.0) -> None:
        if self.loop is not None:
            super().stop(drain_s)
            self.copy_intake.stop(5)

    def copy(
        self, request_id: str, prompt: str = "Hello", *, deadline_s: float = 30.0, **fields: Any
    ) -> str:
        """Have the slot answer a request that another version had."""
        sampling = fields.pop("sampling", SamplingParams(max_tokens=fields.pop("max_tokens", 4)))
        request = GenerateRequest(request_id, "chat", sampling, deadline_s, prompt=prompt, **fields)
        return self.queue.enqueue_copy(request, LANE.version, arm="golden")

    def answers(self) -> dict[str, Answer]:
        return {each.answer.copy_of: each.answer for each in self.queue.read_answers()}

    def wait_for_answer(self, request_id: str) -> Answer:
        wait_until(lambda: request_id in self.answers())
        return self.answers()[request_id]

    def num_copies(self) -> int:
        return int(self.redis.xlen(LANE.key("low")))
