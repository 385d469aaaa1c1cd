"""Several choices of one request, and prompts that begin alike, through the engine's own calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.engine.request import RequestRefused, StepOutput
from inference.protocol import SamplingParams

SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
PROMPT = [(31 * index) % 190 for index in range(21)]
GREEDY = replace(SEEDED, temperature=0.0)


@pytest.fixture
def engine(tiny_artifact: Path) -> LLMEngine:
    config = EngineConfig(
        tiny_artifact,
        dtype="float32",
        block_size=4,
        num_blocks=60,
        num_threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        long_prefill_tokens=16,
        max_model_len=128,
    )
    return LLMEngine.load(config)


def _run(engine: LLMEngine) -> dict[tuple[str, int], list[StepOutput]]:
    outputs: dict[tuple[str, int], list[StepOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault((output.request_id, output.choice), []).append(output)
    engine.check_integrity()
    return outputs


def _answer(engine: LLMEngine, sampling: SamplingParams = SEEDED) -> list[int]:
    engine.add_request("one", PROMPT, sampling)
    return [output.token_id for output in _run(engine)["one", 0]]


def test_the_first_choice_is_the_single_answer_and_the_others_differ(engine: LLMEngine) -> None:
    single = _answer(engine)
    engine.add_request("many", PROMPT, SEEDED, n=4)
    outputs = _run(engine)
    assert sorted(outputs) == [("many", choice) for choice in range(4)]
    answers = [[output.token_id for output in each] for each in outputs.values()]
    assert answers[0] == single
    assert len({tuple(answer) for answer in answers}) == 4
    for each in outputs.values():
        assert [output.index for output in each] == list(range(12))
        assert sum(output.is_last for output in each) == 1
        assert each[-1].num_prompt_tokens == len(PROMPT)


def test_greedy_choices_are_all_the_same(engine: LLMEngine) -> None:
    engine.add_request("many", PROMPT, GREEDY, n=3)
    answers = [[output.token_id for output in each] for each in _run(engine).values()]
    assert answers == 3 * [_answer(engine, GREEDY)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_ends_all_choices_and_frees_what_they_hold(
    engine: LLMEngine, num_steps: int
) -> None:
    engine.add_request("many", PROMPT, SEEDED, n=8)
    assert engine.room() == 0
    for _ in range(num_steps):
        engine.step()
    assert engine.abort("many")
    assert not engine.abort("many")
    assert (engine.has_unfinished, engine.room(), engine.usage().kv_blocks_used) == (False, 8, 0)
    engine.check_integrity()


def test_an_id_is_taken_while_any_choice_goes_on(engine: LLMEngine) -> None:
    engine.add_request("many", PROMPT, replace(SEEDED, max_tokens=1), n=2)
    while not (outputs := engine.step()):
        pass
    assert [(output.choice, output.is_last) for output in outputs] == [(0, True)]
    with pytest.raises(ValueError, match="many"):
        engine.add_request("many", PROMPT, SEEDED)
    assert [choice for _, choice in _run(engine)] == [1]
    assert len(_answer(engine)) == 12


def test_a_request_that_is_refused_leaves_no_choice_behind(engine: LLMEngine) -> None:
    with pytest.raises(RequestRefused):
        engine.add_request("many", PROMPT, replace(SEEDED, max_tokens=128), n=4)
    assert not engine.has_unfinished


def test_what_was_cached_of_a_prompt_is_told_once_and_kept_apart_by_salt(engine: LLMEngine) -> None:
    for name, salt, n in (("cold", "", 1), ("warm", "", 3), ("other", "tenant", 1)):
        engine.add_request(name, PROMPT, SEEDED, cache_salt=salt, n=n)
        outputs = _run(engine)
        told = [each[-1].num_cached_tokens for each in outputs.values()]
        assert told == {"cold": [0], "warm": [20, 0, 0], "other": [0]}[name]
    usage = engine.usage()
    assert usage.kv_blocks_used == 0
    assert usage.kv_blocks_cached > 10


def test_a_standby_keeps_what_fits_and_forgets_the_rest(engine: LLMEngine) -> None:
    single = _answer(engine)
    assert engine.resize_kv(is_standby=True)
    assert engine.resize_kv(is_standby=False)
    assert _answer(engine) == single
    engine.check_integrity()
