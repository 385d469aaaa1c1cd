"""Two versions of one model side by side: tokens per second, the tail, and what 1,000 tokens cost.

Both answer the same requests in this process, round by round in turn, as a slot would: up to eight at once. Engine
seconds are those that each request was attributed, and they are compared with the time that the steps took from outside.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.planner.roofline import cost_per_1k_tokens
from inference.protocol import GenerateRequest, SamplingParams
from tests.bench.weights import import_weights

NUM_REQUESTS = 48
NUM_ROUNDS = 3
AT_ONCE = 8
PRICE_PER_HOUR = 1.0
WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "seven", "wizards", "brew", "tea")


@dataclass(slots=True)
class Tally:
    """What one version did in all rounds."""

    num_tokens: int = 0
    busy_s: float = 0.0
    engine_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)


def measure() -> Iterator[str]:
    """Lines of the report."""
    yield (
        f"\nVersions: {NUM_REQUESTS} requests in {NUM_ROUNDS} alternating rounds, {AT_ONCE} at once, 1 thread, "
        f"at {PRICE_PER_HOUR:g} an hour"
    )
    engines = _load()
    tallies = {name: Tally() for name in engines}
    for _ in range(NUM_ROUNDS):
        for name, engine in engines.items():
            _run(engine, tallies[name])
    for name, tally in tallies.items():
        yield _describe(name, tally)


def _load() -> Mapping[str, LLMEngine]:
    engines = {
        kind: LLMEngine.load(EngineConfig(import_weights(kind), num_threads=1))
        for kind in ("bf16", "int4")
    }
    for engine in engines.values():
        engine.warm_up()
    return engines


def _run(engine: LLMEngine, tally: Tally) -> None:
    waiting = [_request(number) for number in range(NUM_REQUESTS)]
    started_at: dict[str, float] = {}
    while waiting or engine.has_unfinished:
        while waiting and len(started_at) < AT_ONCE:
            request = waiting.pop()
            started_at[request.id] = time.perf_counter()
            engine.add_request(request.id, engine.encode(request), request.sampling)
        began_at = time.perf_counter()
        outputs = engine.step()
        tally.busy_s += time.perf_counter() - began_at
        for output in outputs:
            if output.is_last:
                tally.num_tokens += output.num_output_tokens
                tally.engine_s.append(output.engine_s)
                tally.total_s.append(time.perf_counter() - started_at.pop(output.request_id))


def _request(number: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=16 + number % 5 * 8, temperature=0.0, ignore_eos=True)
    words = [WORDS[(number + place) % len(WORDS)] for place in range(8 + number % 7 * 10)]
    return GenerateRequest(f"r{number}", "", sampling, 60.0, prompt=" ".join(words))


def _describe(name: str, tally: Tally) -> str:
    billed_s = sum(tally.engine_s)
    tokens_per_s = tally.num_tokens / billed_s
    p50, p99 = (statistics.quantiles(tally.total_s, n=100)[each - 1] for each in (50, 99))
    return (
        f"  {name:<6} {tokens_per_s:8.1f} tokens/s   request p50 {p50:6.3f} s  p99 {p99:6.3f} s   "
        f"{cost_per_1k_tokens(PRICE_PER_HOUR, tokens_per_s):.6f} per 1,000 tokens   "
        f"attributed {billed_s:.2f} s of {tally.busy_s:.2f} s in steps ({100 * billed_s / tally.busy_s:.2f} %)"
    )
