"""Program: what this machine reads and multiplies in a second, and how long steps of a version take.

``python -m inference.calibrator rates`` and ``... steps ARTIFACT NAME`` print one JSON object as their last line. It is
a process of its own, because it loads torch, fills memory, and takes the processors for seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import torch

from inference.artifact import read_manifest
from inference.config import EngineConfig, ModelConfig
from inference.engine.llm_engine import LLMEngine
from inference.kernels.loader import Library, choose_library
from inference.machine import (
    available_bytes,
    count_processors,
    last_level_cache_bytes,
    processor_name,
    total_bytes,
)
from inference.models.attention import Span
from inference.models.native import NativeDecoder, native_block_shape
from inference.models.step import Step
from inference.models.weights import FAMILIES, StoredWeight
from inference.planner.curve import MeasuredStep, StepCurve
from inference.planner.hardware import Calibration, Device
from inference.planner.roofline import Roofline
from inference.planner.shape import ModelShape, parse_format
from inference.protocol import SamplingParams
from inference.quantization import SCHEMES
from inference.quantization.int4 import pack

WEIGHTS: Final = ("bf16", "int8", "int4")
BATCHES: Final = (1, 2, 4, 8, 16, 32)
CONTEXT: Final = 64
NUM_STEPS: Final = 16

_MIB = 2**20
_READ_BYTES = 512 * _MIB
_NUM_ROUNDS = 12  # short ones: on a busy machine some are left in peace
_NUM_TOKENS = 128
_GROUP = 32
_BLOCK_SIZE = 16
_SIDE = 4096

_PROBE = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=2,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    context_length=_NUM_TOKENS,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    eos_token_ids=(0,),
    tie_word_embeddings=True,
)
_PROBE_PARAMS = 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096) + 256 * 1024


# ----------------------------------------------------------------------------------------------------------- rates


def measure_rates(config: EngineConfig) -> Calibration:
    """The best of several rounds, with as many threads as an engine of these settings has."""
    started_at = time.monotonic()
    num_threads = config.num_threads or max(count_processors() - 1, 1)
    torch.set_num_threads(num_threads)
    if config.device != "cpu":
        return _measure_device(config, started_at)
    library = choose_library(config)
    size = _buffer_bytes()
    if library is not None:
        bandwidth = float(library.call("read_bandwidth", size, num_threads, _NUM_ROUNDS))
        flops = {weights: _native_flops(library, weights, num_threads) for weights in WEIGHTS}
        how = f"one native step of {_NUM_TOKENS} tokens for each format"
    else:
        bandwidth = _torch_bandwidth(size)
        flops = dict.fromkeys(WEIGHTS, _torch_flops(torch.float32, "cpu", 1024))
        how = "float32 products of torch, which widens every format"
    return Calibration(
        machine=processor_name(),
        kernel="torch" if library is None else library.name,
        num_threads=num_threads,
        memory_bytes=total_bytes(),
        cache_bytes=last_level_cache_bytes(),
        bandwidth=bandwidth,
        flops=flops,
        measured_at=_now(),
        method=f"reading {size // _MIB} MiB; {how}; best of {_NUM_ROUNDS} rounds",
        took_s=round(time.monotonic() - started_at, 2),
        load=round(os.getloadavg()[0] / count_processors(), 2),
    )


def _buffer_bytes() -> int:
    """Twice what the caches hold, so that what is read comes from memory, and a quarter of what is free at most."""
    wanted = max(_READ_BYTES, 2 * last_level_cache_bytes())
    free = available_bytes()
    return wanted if free is None else max(min(wanted, free // 4), _MIB)


def _native_flops(library: Library, weights: str, num_threads: int) -> float:
    """FLOP/s of a step of ``_NUM_TOKENS`` tokens on random weights: what prompts are computed with."""
    decoder = NativeDecoder(
        library,
        _PROBE,
        block_size=_BLOCK_SIZE,
        num_positions=_NUM_TOKENS,
        dtype=torch.bfloat16,
        num_threads=num_threads,
    )
    decoder.pack(_RandomWeights(weights), FAMILIES["llama"], num_positions=_NUM_TOKENS)
    table = list(range(1, 1 + _NUM_TOKENS // _BLOCK_SIZE))
    shape = native_block_shape(library, _PROBE, _BLOCK_SIZE)
    cache = torch.zeros((_PROBE.num_layers, 1 + len(table), *shape), dtype=torch.bfloat16)
    tokens = [index % _PROBE.vocab_size for index in range(_NUM_TOKENS)]
    step = Step(tokens, [Span(0, _NUM_TOKENS, table)], [_NUM_TOKENS - 1])
    work = _roofline(weights).prefill_work(_NUM_TOKENS)
    return work.flops / _best(lambda: decoder.compute(step, cache))


def _roofline(weights: str) -> Roofline:
    """Only its FLOPs are asked for, so any device will do."""
    shape = ModelShape.of_config(_PROBE, params=_PROBE_PARAMS)
    nothing = Device("probe", "probe", 1, 1.0, 1.0, 1.0, "")
    return Roofline(nothing, shape, weights, "bf16")


class _RandomWeights:
    """Weights that nobody trained, in the place of a file."""

    def __init__(self, weights: str) -> None:
        self._weights = weights
        self._noise = np.random.default_rng(0)

    def read(self, name: str, *shape: int) -> torch.Tensor:  # noqa: ARG002 (as a file is read)
        """A norm."""
        return torch.ones(shape)

    def read_stored(self, name: str, *shape: int) -> StoredWeight:  # noqa: ARG002
        """A matrix in the format that is measured."""
        rows, columns = shape
        if self._weights == "bf16":
            values = self._noise.standard_normal((rows, columns), dtype=np.float32) * 0.02
            return StoredWeight(None, (torch.from_numpy(values).bfloat16(),))
        scale = np.full((rows, columns // _GROUP), 0.001, dtype=np.float16)
        if self._weights == "int8":
            codes = self._noise.integers(-128, 128, (rows, columns), dtype=np.int8)
            return StoredWeight(SCHEMES["int8"], (torch.from_numpy(codes), torch.from_numpy(scale)))
        packed = pack(self._noise.integers(0, 16, (rows, columns), dtype=np.uint8))
        parts = (packed, scale, np.zeros_like(scale))
        return StoredWeight(SCHEMES["int4"], tuple(torch.from_numpy(part) for part in parts))


def _measure_device(config: EngineConfig, started_at: float) -> Calibration:
    device = torch.device(config.device)
    properties = torch.cuda.get_device_properties(device)
    size = min(_READ_BYTES * 8, properties.total_memory // 8)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = _torch_flops(torch.bfloat16, config.device, _SIDE)
    return Calibration(
        machine=properties.name,
        kernel="cuda",
        num_threads=1,
        memory_bytes=properties.total_memory,
        cache_bytes=getattr(properties, "L2_cache_size", 0),
        bandwidth=2 * size / _best(lambda: target.copy_(source), device),
        flops=dict.fromkeys(WEIGHTS, rate),
        measured_at=_now(),
        method=f"copying {size // _MIB} MiB; bfloat16 products of torch, which widens integers; best of {_NUM_ROUNDS} rounds",
        took_s=round(time.monotonic() - started_at, 2),
    )


def _torch_bandwidth(size: int) -> float:
    buffer = torch.zeros(size // 8, dtype=torch.int64)
    return size / _best(buffer.sum)


def _torch_flops(dtype: torch.dtype, device: str, side: int) -> float:
    left, right = (torch.ones((side, side), dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / _best(lambda: left @ right, torch.device(device))


def _best(run: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds of the fastest of several rounds, after one that warms up."""

    def timed() -> float:
        started_at = time.perf_counter()
        run()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started_at

    timed()
    return min(timed() for _ in range(_NUM_ROUNDS))


# ----------------------------------------------------------------------------------------------------------- steps


def measure_steps(config: EngineConfig, name: str, batches: Sequence[int] = BATCHES) -> StepCurve:
    """Decode steps of the version in ``config.artifact``, one batch after the other, as its slot would run them."""
    manifest = read_manifest(config.artifact)
    engine = LLMEngine.load(config)
    engine.warm_up()
    is_widened = engine.kernel == "torch" or manifest.quantization == "none"
    weights = parse_format("weights", config.dtype if is_widened else manifest.quantization)
    shape = ModelShape.of_config(
        manifest.model,
        params=manifest.num_parameters,
        weight_bytes=engine.usage().weight_bytes,
    )
    return StepCurve(
        version=name,
        shape=shape,
        weights=weights,
        kv=parse_format("kv", config.dtype),
        context=CONTEXT + NUM_STEPS // 2,
        kernel=engine.kernel,
        num_threads=config.num_threads or max(count_processors() - 1, 1),
        measured_at=_now(),
        steps=tuple(_measure_batches(engine, manifest.model, batches)),
    )


def _measure_batches(
    engine: LLMEngine, model: ModelConfig, batches: Sequence[int]
) -> Iterator[MeasuredStep]:
    """Those batches that run whole: the version's own settings may let fewer sequences in."""
    for batch in batches:
        seconds = _fastest_step(engine, model, batch)
        if seconds is not None:
            yield MeasuredStep(batch, seconds)


def _fastest_step(engine: LLMEngine, model: ModelConfig, batch: int) -> float | None:
    sampling = SamplingParams(max_tokens=NUM_STEPS + 1, temperature=0.0, ignore_eos=True)
    noise = np.random.default_rng(batch)
    for index in range(batch):
        prompt = noise.integers(0, model.vocab_size, CONTEXT).tolist()
        engine.add_request(f"step-{batch}-{index}", prompt, sampling)
    return min(_full_steps(engine, batch), default=None)


def _full_steps(engine: LLMEngine, batch: int) -> Iterator[float]:
    """Seconds of those steps in which every sequence gained a token and none was still reading its prompt."""
    num_before = 0
    while engine.has_unfinished:
        started_at = time.perf_counter()
        num_outputs = len(engine.step())
        seconds = time.perf_counter() - started_at
        if num_outputs == batch == num_before:
            yield seconds
        num_before = num_outputs


# --------------------------------------------------------------------------------------------------------- program


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(prog="inference.calibrator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rates", help="bandwidth and GEMM rates of this machine")
    steps = commands.add_parser("steps", help="decode steps of one version")
    steps.add_argument("artifact", type=Path)
    steps.add_argument("name")
    steps.add_argument("--options", type=json.loads, default={}, help="engine options, JSON")
    chosen = parser.parse_args(arguments)
    if chosen.command == "rates":
        config = EngineConfig.from_env(os.environ, artifact=Path())
        result = measure_rates(config).to_dict()
    else:
        config = EngineConfig.from_env(os.environ, artifact=chosen.artifact)
        result = measure_steps(config.with_options(chosen.options), chosen.name).to_dict()
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
