"""What another process costs that never stops computing: one request alone, with it and without it, in turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference.engine.llm_engine import LLMEngine
from tests.bench import own
from tests.bench.table import Row, ratios, render
from tests.bench.traffic import drive, tokens_per_s
from tests.bench.weights import import_weights
from tests.bench.workload import Workload

SETTLE_S = 0.2
SEED = 3000


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes without a pause, wherever the system lets it."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        process.kill()
        process.wait()


def measure(*, is_quick: bool) -> Iterator[str]:
    """Lines of the report."""
    artifact = import_weights("int4")
    workload = own.sample_workload(artifact, is_quick=is_quick)
    yield "\nOne process beside the engine that never stops computing"
    yield from render(measure_neighbour(artifact, workload, is_quick=is_quick))


def measure_neighbour(artifact: Path, workload: Workload, *, is_quick: bool) -> Iterator[Row]:
    """For the engine's own number of threads, cores - 1, and for all cores."""
    cores = len(os.sched_getaffinity(0))
    num_rounds = 2 if is_quick else 5
    for num_threads in sorted({max(cores - 1, 1), cores}):
        engine = own.load(artifact, num_threads)
        idle, beside = [], []
        for number in range(num_rounds):
            idle.append(_alone(engine, workload, SEED + 2 * number))
            with busy_process():
                beside.append(_alone(engine, workload, SEED + 2 * number + 1))
        measured = f"single stream, {num_threads} threads, tokens/s"
        yield Row(measured, "tatkal int4, idle machine", idle)
        yield Row(measured, "tatkal int4, one busy process beside", beside)
        yield Row(measured, "beside / idle", ratios(beside, idle), ".2f", "aim 0.5")
        del engine


def _alone(engine: LLMEngine, workload: Workload, seed: int) -> float:
    return tokens_per_s(drive(engine, [workload.single(seed)]))
