"""Ten thousand requests leave nothing behind: neither objects, nor memory that Python does not see, nor blocks."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.engine.request import StepOutput
from inference.protocol import SamplingParams

NUM_REQUESTS, NUM_WARM_UP, NUM_LEAKING = 10_000, 1_000, 1_000
MOST_OBJECTS = 300
MOST_BYTES = 8 * 2**20
STATM = Path("/proc/self/statm")
Keep = Callable[[StepOutput], object]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not STATM.exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"),
        reason="resident memory is read from /proc (Linux), and freed by glibc's malloc_trim",
    ),
]


@dataclass(frozen=True, slots=True)
class Growth:
    """What is there after some requests that was not there before."""

    num_objects: int
    num_bytes: int


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> LLMEngine:
    """Warm: caches of first use are full, and so is every block that a prompt may leave behind."""
    config = EngineConfig(
        tiny_artifact,
        block_size=4,
        num_blocks=120,
        num_threads=1,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=32,
    )
    engine = LLMEngine.load(config)
    answer(engine, NUM_WARM_UP, seed=0)
    return engine


def answer(engine: LLMEngine, num_requests: int, *, seed: int, keep: Keep | None = None) -> None:
    """Requests of one to six tokens for one or two, as many at once as the engine takes; ``keep`` is shown all outputs."""
    generator = random.Random(seed)  # noqa: S311 (prompts, no secrets)
    num_sent = num_ended = 0
    while num_ended < num_requests:
        while num_sent < num_requests and engine.room():
            sampling = SamplingParams(max_tokens=generator.choice((1, 2)), ignore_eos=True)
            prompt = generator.choices(range(256), k=generator.randint(1, 6))
            engine.add_request(f"{seed}-{num_sent}", prompt, sampling)
            num_sent += 1
        for output in engine.step():
            assert output.failure is None
            num_ended += output.finish_reason is not None
            if keep is not None:
                keep(output)


def measure(engine: LLMEngine, num_requests: int, *, seed: int, keep: Keep | None = None) -> Growth:
    num_objects, num_bytes = look()
    answer(engine, num_requests, seed=seed, keep=keep)
    after = look()
    return Growth(after[0] - num_objects, after[1] - num_bytes)


def look() -> tuple[int, int]:
    """Objects that Python's collector knows, and resident bytes of this process.

    What tests before left free in the heap goes back first: a leak that found room there would not be seen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(STATM.read_text(encoding="ascii").split()[1])
    return len(gc.get_objects()), pages * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_after_ten_thousand_requests(engine: LLMEngine) -> None:
    growth = measure(engine, NUM_REQUESTS, seed=1)

    assert growth.num_objects < MOST_OBJECTS
    assert growth.num_bytes < MOST_BYTES
    assert engine.usage().kv_blocks_used == 0
    assert not engine.has_unfinished
    engine.check_integrity()


def test_an_object_kept_of_every_request_would_be_seen(engine: LLMEngine) -> None:
    kept: list[StepOutput] = []
    assert measure(engine, NUM_LEAKING, seed=2, keep=kept.append).num_objects > MOST_OBJECTS


def test_memory_kept_of_every_request_would_be_seen(engine: LLMEngine) -> None:
    kept: list[bytes] = []
    growth = measure(engine, NUM_LEAKING, seed=3, keep=lambda _: kept.append(os.urandom(16_384)))
    assert growth.num_objects < MOST_OBJECTS
    assert growth.num_bytes > MOST_BYTES
