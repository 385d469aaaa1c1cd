"""What a shared system prompt costs with the prefix cache and without: 16 requests at once, real weights, no HTTP.

Each round has a system prompt that nobody has seen, then the same one again, as later requests find it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.protocol import SamplingParams
from tests.bench.table import Row, ratios, render
from tests.bench.weights import import_weights

NUM_REQUESTS = 16
SYSTEM_TOKENS = 800
OWN_TOKENS = 20
OUTPUT_TOKENS = 32
FIRST, LAST = 1000, 40_000  # ids of plain words
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Burst:
    """All requests of one burst."""

    ttft_s: float
    tokens_per_s: float


def measure(*, is_quick: bool) -> Iterator[str]:
    """Lines of the report, on one thread."""
    yield (
        f"\nPrefix cache: {NUM_REQUESTS} requests at once, {SYSTEM_TOKENS} tokens of one system prompt and "
        f"{OWN_TOKENS} of their own, {OUTPUT_TOKENS} output tokens each, int4, 1 thread"
    )
    yield from render(_rows(num_rounds=1 if is_quick else 3))


def _rows(num_rounds: int) -> Iterator[Row]:
    artifact = import_weights("int4")
    engines = {
        name: LLMEngine.load(EngineConfig(artifact, num_threads=1, prefix_cache=is_cached))
        for name, is_cached in (("cache off", 0), ("cache on", 1))
    }
    bursts: dict[str, list[Burst]] = {}
    for number in range(num_rounds):
        for name, engine in engines.items():
            draw = random.Random(number)  # noqa: S311 - the same prompts for both
            system = _words(draw, SYSTEM_TOKENS)
            for when in ("first seen", "seen before"):
                if name == "cache on" or when == "first seen":
                    bursts.setdefault(f"{name}, {when}", []).append(_run(engine, system, draw))
    without = bursts.pop("cache off, first seen")
    yield Row("median TTFT, s", "cache off", [each.ttft_s for each in without], ".2f")
    for name, each in bursts.items():
        yield Row("median TTFT, s", name, [burst.ttft_s for burst in each], ".2f")
    for name, each in bursts.items():
        gain = ratios([burst.ttft_s for burst in without], [burst.ttft_s for burst in each])
        yield Row("TTFT, times shorter", name, gain, ".2f")
    yield Row("tokens/s", "cache off", [each.tokens_per_s for each in without])
    for name, each in bursts.items():
        yield Row("tokens/s", name, [burst.tokens_per_s for burst in each])
    for name, each in bursts.items():
        gain = ratios(
            [burst.tokens_per_s for burst in each], [burst.tokens_per_s for burst in without]
        )
        yield Row("tokens/s, times more", name, gain, ".2f")


def _run(engine: LLMEngine, system: list[int], draw: random.Random) -> Burst:
    names = [f"{number}" for number in range(NUM_REQUESTS)]
    for name in names:
        engine.add_request(name, [*system, *_words(draw, OWN_TOKENS)], GREEDY)
    began_at = time.perf_counter()
    first_at: dict[str, float] = {}
    while engine.has_unfinished:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first_at.setdefault(output.request_id, now)
    elapsed_s = time.perf_counter() - began_at
    return Burst(
        median(at - began_at for at in first_at.values()), NUM_REQUESTS * OUTPUT_TOKENS / elapsed_s
    )


def _words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(FIRST, LAST) for _ in range(count)]
