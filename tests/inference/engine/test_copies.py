"""Copies beside requests on the real engine, with a random model: a request is a step late at most, and answers repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from inference.config import EngineConfig
from inference.engine import copies as copies_module
from inference.engine import copy_intake as copy_intake_module
from inference.engine import intake as intake_module
from inference.engine.llm_engine import LLMEngine
from inference.engine.request import StepOutput
from inference.protocol import GenerateRequest, SamplingParams
from tests.inference.engine.copy_bench import CopyBench
from tests.inference.slot_process import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)
STEP_S = 0.004  # so that requests come while copies run
Make = Callable[..., "CountingEngine"]


@dataclass
class Life:
    """At which steps a request was added, and got its first and its last token."""

    added: int
    first: int = -1
    last: int = -1

    @property
    def steps(self) -> tuple[int, int]:
        """To the first token, and to the last."""
        return self.first - self.added, self.last - self.added


class CountingEngine(LLMEngine):
    """Counts its steps, and remembers the life of every request that was finished."""

    num_steps = 0
    lives: dict[str, Life]

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        **more: Any,
    ) -> None:
        self.lives[request_id] = Life(self.num_steps)
        super().add_request(request_id, prompt_token_ids, sampling, **more)

    def step(self) -> list[StepOutput]:
        time.sleep(STEP_S)
        outputs = super().step()
        self.num_steps += 1
        for output in outputs:
            life = self.lives[output.request_id]
            life.first = self.num_steps if life.first < 0 else life.first
            life.last = self.num_steps
        return outputs


@pytest.fixture
def make(tiny_artifact: Path) -> Make:
    def load(**options: Any) -> CountingEngine:
        values: dict[str, Any] = {
            "dtype": "float32",
            "block_size": 4,
            "num_blocks": 80,
            "num_threads": 1,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "long_prefill_tokens": 16,
            "max_model_len": 256,
        }
        engine = CountingEngine.load(EngineConfig(tiny_artifact, **values | options))
        engine.lives = {}
        return engine

    return load


@pytest.fixture
def bench(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyBench]:
    for module, name in ((intake_module, "PULL_BLOCK_MS"), (intake_module, "WATCH_BLOCK_MS")):
        monkeypatch.setattr(module, name, 20)
    monkeypatch.setattr(copy_intake_module, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(copies_module, "FREE_SHARE", 0.9)
    bench = CopyBench(redis_url)
    yield bench
    bench.stop()
    bench.queue.close()
    bench.redis.close()


def request(name: str, num_tokens: int, num_output: int) -> GenerateRequest:
    sampling = replace(GREEDY, max_tokens=num_output)
    return GenerateRequest(name, "chat", sampling, 30.0, prompt=(f"{name} " * 200)[:num_tokens])


def steps_alone(
    bench: CopyBench, engine: CountingEngine, asked: GenerateRequest
) -> tuple[int, int]:
    bench.start_with(engine)
    bench.send_request(asked)
    bench.wait_for_last(asked.id)
    bench.stop()
    return engine.lives[asked.id].steps


@pytest.mark.parametrize(
    ("num_blocks", "copied", "asked"),
    [
        pytest.param(200, (180, 40), (60, 12), id="while copies compute long prompts"),
        pytest.param(80, (60, 90), (120, 12), id="while copies hold the blocks"),
        pytest.param(80, (40, 120), (12, 100), id="while copies need ever more blocks"),
    ],
)
def test_a_copy_delays_a_request_by_one_step_at_most(
    bench: CopyBench,
    make: Make,
    num_blocks: int,
    copied: tuple[int, int],
    asked: tuple[int, int],
) -> None:
    alone = steps_alone(bench, make(num_blocks=num_blocks), request("r0", *asked))
    engine = make(num_blocks=num_blocks)
    bench.member.renew()
    bench.start_with(engine)
    for number in range(2):
        copy = request(f"c{number}", *copied)
        assert bench.queue.enqueue_copy(copy, "small/1", arm="golden") == "queued"
    wait_until(lambda: len(engine.lives) == 2)

    bench.send_request(request("r1", *asked))
    bench.wait_for_last("r1")

    first, last = engine.lives["r1"].steps
    assert first <= alone[0] + 1
    assert last <= alone[1] + 1
    answers = [bench.wait_for_answer(f"c{number}") for number in range(2)]
    assert {each.outcome for each in answers} == {"ok"}
    assert {each.completion_tokens for each in answers} == {copied[1]}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_incumbent_answers_itself_without_a_difference(
    bench: CopyBench, make: Make, sampling: SamplingParams
) -> None:
    """Beside other requests, and whatever it made way for: the floor of every comparison is 0."""
    texts = texts_of_both(bench, make(), sampling, "Question {} ", num=6)

    assert len(set(texts.values())) > 1


@pytest.mark.slow
def test_real_weights_answer_themselves_without_a_difference(
    bench: CopyBench, real_artifact: Path
) -> None:
    engine = CountingEngine.load(EngineConfig(real_artifact, num_threads=1, max_num_seqs=8))
    engine.lives = {}

    texts = texts_of_both(bench, engine, SEEDED, "Name {} rivers of India.", num=4)

    assert len(set(texts.values())) == len(texts)


def texts_of_both(
    bench: CopyBench, engine: CountingEngine, sampling: SamplingParams, prompt: str, *, num: int
) -> dict[str, str]:
    """Answers to ``num`` questions, each of which its own copy has given as well."""
    bench.queue.apply_route(
        replace(_route_of(bench), generation=3, self_bp=10_000, rollout="r-self")
    )
    bench.start_with(engine)
    asked = [
        GenerateRequest(f"q{number}", "chat", sampling, 60.0, prompt=prompt.format(number) * number)
        for number in range(1, num + 1)
    ]
    placements = [bench.send_request(each) for each in asked]

    texts = {each.id: "".join(row.text for row in bench.wait_for_last(each.id)) for each in asked}
    kept = [each.id for each, placed in zip(asked, placements, strict=True) if placed.kept_for]

    assert len(kept) >= num - 1
    answers = {name: bench.wait_for_answer(name) for name in kept}
    assert {name: answer.text for name, answer in answers.items()} == {n: texts[n] for n in kept}
    assert {answer.arm for answer in answers.values()} == {"self"}
    return texts


def _route_of(bench: CopyBench) -> Any:
    route = bench.queue.read_route("chat")
    assert route is not None
    return route
