"""A KV cache that grows and shrinks under running requests: no token changes, nobody is lost, nobody is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.config import EngineConfig
from inference.engine import kv_memory
from inference.engine.llm_engine import LLMEngine
from inference.engine.request import RequestRefused
from inference.planner import memory as planner
from inference.planner.memory import MARGIN_BYTES
from inference.protocol import SamplingParams

BLOCK_SIZE = 4
FULL, FLOOR = 60, 11
DRAWN = SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
LENGTHS = (5, 17, 9, 21, 38)


class Memory:
    """What the machine has left, in KV blocks; None: nobody knows."""

    def __init__(self) -> None:
        self.blocks: int | None = None
        self.block_bytes = 0

    def available_bytes(self) -> int | None:
        """As the engine asks."""
        return None if self.blocks is None else MARGIN_BYTES + self.blocks * self.block_bytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(kv_memory, "available_bytes", memory.available_bytes)
    monkeypatch.setattr(planner, "STANDBY_TOKENS", (FLOOR - 1) * BLOCK_SIZE)
    return memory


@pytest.fixture
def engine(tiny_artifact: Path, memory: Memory) -> LLMEngine:
    config = EngineConfig(
        tiny_artifact,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=FULL,
        standby_kv_bytes=1,
        num_threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        long_prefill_tokens=16,
        max_model_len=128,
    )
    engine = LLMEngine.load(config)
    memory.block_bytes = engine._sizes.kv_block_bytes
    return engine


def _prompt(length: int) -> list[int]:
    return [(31 * index + length) % 190 for index in range(length)]


def _add_all(engine: LLMEngine) -> dict[str, list[int]]:
    for length in LENGTHS:
        engine.add_request(str(length), _prompt(length), DRAWN)
    return {str(length): [] for length in LENGTHS}


def _step(engine: LLMEngine, tokens: dict[str, list[int]]) -> None:
    for output in engine.step():
        assert output.failure is None
        tokens[output.request_id].append(output.token_id)


def _finish(engine: LLMEngine, tokens: dict[str, list[int]]) -> dict[str, list[int]]:
    while engine.has_unfinished:
        _step(engine, tokens)
    engine.check_integrity()
    return tokens


def test_a_loaded_engine_has_the_floor_and_grows_with_its_first_request(engine: LLMEngine) -> None:
    assert (engine.usage().kv_blocks, engine.usage().kv_blocks_full) == (FLOOR - 1, FULL - 1)
    engine.add_request("a", _prompt(5), DRAWN)
    assert engine.usage().kv_blocks == FULL - 1


def test_an_engine_without_swap_space_asks_for_no_memory_once_it_is_full(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        tiny_artifact, dtype="float32", block_size=4, num_blocks=FULL, num_threads=1, swap_bytes=0
    )
    engine = LLMEngine.load(config)
    assert engine.resize_kv(is_standby=False)

    def ask() -> int:
        raise AssertionError("The machine was asked for what is there, for every request.")

    monkeypatch.setattr(kv_memory, "available_bytes", ask)
    engine.add_request("a", _prompt(5), DRAWN)


def test_a_standby_shrinks_once_nothing_is_held_beyond_its_floor(engine: LLMEngine) -> None:
    expected = _finish(engine, _add_all(engine))
    tokens = _add_all(engine)
    for _ in range(8):
        _step(engine, tokens)
    assert not engine.resize_kv(is_standby=True)
    assert engine.usage().kv_blocks == FULL - 1
    assert _finish(engine, tokens) == expected
    assert engine.resize_kv(is_standby=True)
    assert engine.usage().kv_blocks == FLOOR - 1
    assert engine.resize_kv(is_standby=True)
    assert engine.resize_kv(is_standby=False)
    assert engine.usage().kv_blocks == FULL - 1


def test_what_needs_more_than_the_floor_waits_for_memory_and_is_not_refused(
    engine: LLMEngine, memory: Memory
) -> None:
    memory.blocks = 0
    long = _prompt(60)
    engine.add_request("long", long, replace(DRAWN, max_tokens=3))
    assert engine.step() == []
    assert engine.has_unfinished
    memory.blocks = FULL
    assert [len(each) for each in _finish(engine, {"long": []}).values()] == [3]

    with pytest.raises(RequestRefused):
        engine.add_request("never", _prompt(128), DRAWN)


def test_a_sequence_that_outgrows_the_floor_goes_on_when_there_is_memory(
    engine: LLMEngine, memory: Memory
) -> None:
    sampling = replace(DRAWN, max_tokens=60)
    engine.add_request("a", _prompt(5), sampling)
    expected = _finish(engine, {"a": []})
    assert engine.resize_kv(is_standby=True)

    memory.blocks = 0
    engine.add_request("a", _prompt(5), sampling)
    tokens: dict[str, list[int]] = {"a": []}
    for _ in range(45):
        _step(engine, tokens)
    assert 0 < len(tokens["a"]) < 45
    memory.blocks = FULL
    assert _finish(engine, tokens) == expected


def test_a_cache_grows_as_far_as_memory_allows(engine: LLMEngine, memory: Memory) -> None:
    memory.blocks = 20
    assert not engine.resize_kv(is_standby=False)
    assert engine.usage().kv_blocks == FLOOR + 20 - 1
    memory.blocks = FULL
    assert engine.resize_kv(is_standby=False)


def test_a_cache_that_cannot_be_allocated_stays_as_it_is(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    expected = _finish(engine, _add_all(engine))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        assert not engine.resize_kv(is_standby=True)
        engine.check_integrity()
    assert engine.usage().kv_blocks == FULL - 1
    assert _finish(engine, _add_all(engine)) == expected


_ACTIONS = st.lists(
    st.sampled_from(["step", "step", "step", "grow", "shrink", "short", "some", "plenty"]),
    max_size=60,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(actions=_ACTIONS)
def test_growing_and_shrinking_in_the_middle_changes_no_token(
    engine: LLMEngine, memory: Memory, actions: Sequence[str]
) -> None:
    memory.blocks = None
    expected = _finish(engine, _add_all(engine))
    engine.resize_kv(is_standby=True)
    rooms = {"short": 0, "some": 2 * FLOOR, "plenty": FULL}
    memory.blocks = 0
    tokens = _add_all(engine)
    for action in actions:
        if action == "step":
            _step(engine, tokens)
        elif action in rooms:
            memory.blocks = rooms[action]
        else:
            engine.resize_kv(is_standby=action == "shrink")
        engine.check_integrity()
        usage = engine.usage()
        assert usage.kv_blocks_used <= usage.kv_blocks
    memory.blocks = None
    assert _finish(engine, tokens) == expected
    assert not engine.usage().kv_blocks_used
