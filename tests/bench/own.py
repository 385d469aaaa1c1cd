"""The engine against itself and its limits: the bandwidth of memory, static batching, and a rising rate of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from inference.artifact import WEIGHTS
from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.kernels.loader import KernelUnavailable, load_library
from tests.bench.table import Row, ratios, render
from tests.bench.traffic import (
    Limits,
    arrive_at_random,
    drive,
    drive_in_waves,
    goodput,
    tokens_per_s,
)
from tests.bench.weights import KINDS, import_weights
from tests.bench.workload import Workload

READ_BYTES = 512 * 2**20  # many times what any cache holds
READ_TRIES = 3
LIMITS = Limits(ttft_s=1.0, tpot_s=0.05)
SLOTS = 16  # where batches are compared
SEED = 1000  # of the rounds here: no prompt of the comparison comes again


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: of the sweep, requests a second, and seconds of arrivals for each."""

    num_rounds: int
    rates: tuple[float, ...]
    arrivals_s: float


FULL = Size(num_rounds=5, rates=(1, 2, 4, 8), arrivals_s=15.0)
QUICK = Size(num_rounds=2, rates=(2, 8), arrivals_s=2.0)


def measure(*, is_quick: bool) -> Iterator[str]:
    """Lines of the report, on the engine's own number of threads."""
    artifacts = {kind: import_weights(kind) for kind in KINDS}
    workload = sample_workload(artifacts["int4"], is_quick=is_quick)
    yield "\nThe engine against its limits and against static batching"
    yield from render(rows(artifacts, workload, num_threads=0, is_quick=is_quick))


def sample_workload(artifact: Path, *, is_quick: bool) -> Workload:
    """64 requests of the usual lengths, or few short ones."""
    if is_quick:
        return Workload.of(artifact, num_requests=8, longest=24)
    return Workload.of(artifact, num_requests=64)


def rows(
    artifacts: Mapping[str, Path], workload: Workload, *, num_threads: int, is_quick: bool
) -> Iterator[Row]:
    """All of it; ``num_threads`` 0 is the engine's own choice."""
    size = QUICK if is_quick else FULL
    for kind, artifact in artifacts.items():
        engine = load(artifact, num_threads)
        yield from measure_bandwidth(kind, artifact, engine, workload, num_threads, size)
        if kind == "int4":
            yield from measure_batching(artifact, workload, num_threads, size)
            yield from measure_sweep(engine, workload, size)
        del engine


def load(artifact: Path, num_threads: int, *, max_num_seqs: int = 64) -> LLMEngine:
    """Loaded and warm."""
    config = EngineConfig(artifact, num_threads=num_threads, max_num_seqs=max_num_seqs)
    engine = LLMEngine.load(config)
    engine.warm_up()
    return engine


def read_bandwidth(num_threads: int) -> float:
    """Bytes per second that so many threads can read, the best of some tries; 0 without the native library."""
    try:
        return float(load_library().call("read_bandwidth", READ_BYTES, num_threads, READ_TRIES))
    except KernelUnavailable:
        return 0.0


def measure_bandwidth(
    kind: str, artifact: Path, engine: LLMEngine, workload: Workload, num_threads: int, size: Size
) -> Iterator[Row]:
    """Weights read by a decode step of one sequence, in bytes per second, over what memory gives.

    A step reads every weight once: bytes per second = bytes of the weights / TPOT of a request alone.
    """
    num_threads = num_threads or torch.get_num_threads()  # which loading the engine has set
    weight_bytes = (artifact / WEIGHTS).stat().st_size
    limits, reached = [], []
    for number in range(size.num_rounds):
        limits.append(read_bandwidth(num_threads))
        (answer,) = drive(engine, [workload.single(seed=SEED + number)])
        reached.append(weight_bytes / answer.tpot_s)
    if not all(limits):
        return
    name = f"tatkal {kind}"
    note = f"{weight_bytes / 1e6:.0f} MB of weights; {num_threads} threads"
    giga = [each / 1e9 for each in limits]
    yield Row(
        "memory read, GB/s", "", giga, note=f"{READ_BYTES / 2**20:.0f} MiB, {num_threads} threads"
    )
    yield Row("weights read at B = 1 / memory read", name, ratios(reached, limits), ".2f", note)


def measure_batching(
    artifact: Path, workload: Workload, num_threads: int, size: Size
) -> Iterator[Row]:
    """Requests of the same lengths, begun whenever a slot is free, and begun in waves that wait for their longest."""
    static, continuous = [], []
    slots = min(SLOTS, workload.num_requests // 2)
    engine = load(artifact, num_threads, max_num_seqs=slots)
    for number in range(size.num_rounds):
        waves, stream = (workload.requests(SEED + number, text=text) for text in (1, 2))
        static.append(tokens_per_s(drive_in_waves(engine, waves, size=slots)))
        continuous.append(tokens_per_s(drive(engine, stream)))
    measured = f"{workload.num_requests} requests in {slots} slots, tokens/s"
    yield Row(measured, "tatkal int4, static", static)
    yield Row(measured, "tatkal int4, continuous", continuous)
    yield Row(measured, "continuous / static", ratios(continuous, static), ".2f")


def measure_sweep(engine: LLMEngine, workload: Workload, size: Size) -> Iterator[Row]:
    """A Poisson process of each rate, with a fixed seed: what share of the requests keep the limits?"""
    told = f"TTFT <= {LIMITS.ttft_s:g} s and TPOT <= {1000 * LIMITS.tpot_s:g} ms"
    for rate in size.rates:
        num_requests = max(int(rate * size.arrivals_s), 2)
        asked = replace(workload, num_requests=num_requests).requests(seed=SEED + int(rate))
        answers = drive(engine, arrive_at_random(asked, rate, seed=SEED))
        ttft_s = sorted(each.ttft_s for each in answers)
        tpot_ms = 1000 * median(each.tpot_s for each in answers)
        note = (
            f"{told}; TTFT p50 {median(ttft_s):.2f} s, longest {ttft_s[-1]:.2f} s; TPOT p50 {tpot_ms:.1f} ms; "
            f"{tokens_per_s(answers):.0f} tokens/s; {num_requests} requests"
        )
        kept = [goodput(answers, LIMITS)]
        yield Row(f"goodput at {rate:g} requests/s", "tatkal int4", kept, ".2f", note)
