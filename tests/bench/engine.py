"""Tokens per second of the engine in this process: real weights, no HTTP, no Redis.

The kernels take turns, round by round, and each figure is a median over the rounds. A decode step reads every weight
once, whatever the batch: so one sequence is bound by memory, and its bytes per second are given beside what the same
number of threads can read from a buffer of 512 MiB. More than 100 % means that a cache held a part of the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.protocol import GenerateRequest, SamplingParams
from tests.bench.own import read_bandwidth
from tests.bench.weights import import_weights

BATCHES = (1, 8, 32)
NUM_TOKENS = 64
NUM_ROUNDS = 3
NUM_THREADS = 1
TEXT = 8 * "The quick brown fox jumps over the lazy dog while seven wizards brew strong tea. "

BASELINE = "torch"


@dataclass(frozen=True, slots=True)
class Row:
    """An engine of the table; ``step_bytes`` is what one step reads of its weights, 0 if unknown."""

    engine: LLMEngine
    load_s: float
    step_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch, measured."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure() -> Iterator[str]:
    """Lines of the report."""
    yield (
        f"\nEngine: SmolLM2-135M-Instruct, CPU, {NUM_THREADS} thread, {NUM_TOKENS} tokens each, "
        f"greedy, medians of {NUM_ROUNDS} alternating rounds"
    )
    rows = _load_rows()
    for name, row in rows.items():
        yield f"  {name:<12} kernel {row.engine.kernel}, loaded and warm in {row.load_s:.1f} s"
    bandwidth = read_bandwidth(NUM_THREADS)
    if bandwidth:
        yield f"  memory read  {bandwidth / 1e9:.1f} GB/s"
    for num_requests in BATCHES:
        yield from _measure_batch(rows, num_requests, bandwidth)


def _measure_batch(rows: Mapping[str, Row], num_requests: int, bandwidth: float) -> Iterator[str]:
    rounds = [
        {name: _run(row.engine, num_requests) for name, row in rows.items()}
        for _ in range(NUM_ROUNDS)
    ]
    base = statistics.median(each[BASELINE].decode_tokens_per_s for each in rounds)
    yield f"  batch {num_requests}"
    for name, row in rows.items():
        decode = statistics.median(each[name].decode_tokens_per_s for each in rounds)
        prefill = statistics.median(each[name].prefill_tokens_per_s for each in rounds)
        line = (
            f"    {name:<12} decode {decode:7.1f} tokens/s ({decode / base:5.2f}x torch)   "
            f"prefill {prefill:7.1f} tokens/s"
        )
        if num_requests == 1 and row.step_bytes and bandwidth:
            line += f"   weights read at {decode * row.step_bytes / bandwidth:.0%} of memory read"
        yield line


def _load_rows() -> dict[str, Row]:
    int4, bfloat16 = import_weights("int4"), import_weights("bf16")
    rows = {}
    if read_bandwidth(NUM_THREADS):
        rows["native int4"] = _load(int4, "native")
        rows["native bf16"] = _load(bfloat16, "native")
    rows[BASELINE] = _load(bfloat16, "torch")
    return rows


def _load(artifact: Path, kernel: str) -> Row:
    started_at = time.perf_counter()
    config = EngineConfig(
        artifact,
        kernel=kernel,
        num_threads=NUM_THREADS,
        kv_cache_bytes=256 * 2**20,
        prefix_cache=0,  # each round has the prompts of the one before
    )
    engine = LLMEngine.load(config)
    engine.warm_up()
    load_s = time.perf_counter() - started_at
    size = (artifact / "model.safetensors").stat().st_size
    return Row(engine, load_s, size if kernel == "native" else 0)


def _run(engine: LLMEngine, num_requests: int) -> Measured:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    num_prompt_tokens = 0
    for index in range(num_requests):
        prompt_text = TEXT[index : index + 400]
        request = GenerateRequest(
            f"bench-{index}", "", sampling, deadline_s=600, prompt=prompt_text
        )
        prompt = engine.encode(request)
        num_prompt_tokens += len(prompt)
        engine.add_request(request.id, prompt, sampling)
    started_at = time.perf_counter()
    num_started = 0
    while num_started < num_requests:
        num_started += sum(output.index == 0 for output in engine.step())
    prefilled_at = time.perf_counter()
    num_decoded = 0
    while engine.has_unfinished:
        num_decoded += len(engine.step())
    ended_at = time.perf_counter()
    return Measured(
        num_prompt_tokens / (prefilled_at - started_at), num_decoded / (ended_at - prefilled_at)
    )
