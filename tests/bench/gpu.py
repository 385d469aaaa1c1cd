"""`python -m tests.bench.gpu`: is the CUDA step right, and how fast is it? One command for a machine with one GPU.

It needs torch, numpy, safetensors, tokenizers, jinja2 and pytest, and nothing from outside: the models have random weights. First
the tests marked ``gpu``; if one fails, nothing is measured. Then decode steps of a model of Llama 3.2 1B's shape at
512 tokens of context, in bf16 and int4, for 1, 8 and 64 sequences: seconds of a step with everything the host does, and
bytes per second (weights and KV read once) over what a copy on this device moves. Then the engine, with scheduler and sampler.

The last line, and ``$OUT/gpu.json`` where ``OUT`` is set, are all figures as JSON. ``--device cpu --quick`` shows that the
script works, with tiny shapes; such numbers are no result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.engine.llm_engine import LLMEngine
from inference.models.attention import Span
from inference.models.cuda.decoder import CudaDecoder, DecoderOptions
from inference.models.step import Step
from inference.models.weights import StoredWeight
from inference.protocol import SamplingParams
from inference.quantization import SCHEMES
from tests.inference.tiny_artifact import write_tiny

ROOT = Path(__file__).parents[2]
TESTS = "tests/inference/models/cuda/test_on_device.py"
TESTS_TIMEOUT_S = 150
BATCHES = (1, 8, 64)
KINDS = ("bf16", "int4")
CONTEXT = 512
BLOCK_SIZE = 16
GROUP = 32

# Llama 3.2 1B: https://huggingface.co/meta-llama/Llama-3.2-1B (config.json). Without a device, a shape that takes no time.
LLAMA_1B: Mapping[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
}
# SmolLM2-135M: https://huggingface.co/HuggingFaceTB/SmolLM2-135M (config.json).
SMOL_135M: Mapping[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
}
TINY: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how long."""

    device: torch.device
    is_quick: bool

    @property
    def num_steps(self) -> int:
        """Decode steps of one figure."""
        return 4 if self.is_quick else 64

    def shape(self, full: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model to measure."""
        return TINY if self.is_quick else full


@dataclass(frozen=True, slots=True)
class Decode:
    """One figure: a decode step of ``batch`` sequences."""

    kind: str
    kernel: str
    batch: int
    graphs: bool
    step_ms: float
    tokens_per_s: float
    step_bytes: int
    bandwidth_fraction: float


class RandomWeights:
    """Weights of any shape, made where they are asked for; ``kind`` int4 makes quantised matrices."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self._is_int4 = kind == "int4"
        self._device = device
        self._draw = torch.Generator(device).manual_seed(0)

    def read(self, _name: str, *shape: int) -> Tensor:
        """A norm's scale."""
        return torch.ones(shape)

    def read_stored(self, name: str, *shape: int) -> StoredWeight:
        """A matrix whose products have about the size of their inputs."""
        rows, columns = shape
        if not self._is_int4 or "layers" not in name:
            values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            return StoredWeight(None, (values.normal_(0, columns**-0.5, generator=self._draw),))
        codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=self._device)
        codes.random_(256, generator=self._draw)
        scale = torch.full((rows, columns // GROUP), 0.2 * columns**-0.5, device=self._device)
        scale = scale.to(torch.float16)
        return StoredWeight(SCHEMES["int4"], (codes, scale, -7.5 * scale))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few steps; no result")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device here; --device cpu --quick shows that the script works."
        )
    started_at = time.monotonic()
    report: dict[str, Any] = {"torch": torch.__version__, "tests": run_tests()}
    if report["tests"] == 0:
        setting = Setting(torch.device(options.device), options.quick)
        report |= measure(setting)
    report["seconds"] = round(time.monotonic() - started_at, 1)
    write(report)
    return int(report["tests"])


def run_tests() -> int:
    """The exit status of pytest over the device's tests, without the configuration that servers need."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-c",
        os.devnull,
        "--rootdir",
        str(ROOT),
    ]
    plugins = ["--noconftest", "--import-mode=importlib", "-p", "tests.bench.gpu_fixtures"]
    run = subprocess.run(
        [*command, *plugins, TESTS], cwd=ROOT, timeout=TESTS_TIMEOUT_S, check=False
    )
    return run.returncode


def measure(setting: Setting) -> dict[str, Any]:
    """All figures; each is printed when it is known."""
    bandwidth = copy_bandwidth(setting)
    say(f"device copy {bandwidth / 1e9:.0f} GB/s (bytes read and written)")
    decode = []
    for kind in KINDS:
        for figure in measure_kind(setting, kind, bandwidth):
            say(
                f"{figure.kind} {figure.kernel} B={figure.batch:<3} graphs={figure.graphs!s:<5} "
                f"{figure.step_ms:7.3f} ms {figure.tokens_per_s:9.0f} tokens/s "
                f"{figure.bandwidth_fraction:6.1%} of copy bandwidth"
            )
            decode.append(asdict(figure))
    engine = measure_engine(setting)
    say(f"engine, SmolLM2-135M's shape, bf16, tokens/s by batch: {engine}")
    return {"copy_bytes_per_s": bandwidth, "decode": decode, "engine_tokens_per_s": engine}


def copy_bandwidth(setting: Setting) -> float:
    """Bytes that a copy within the device reads and writes per second, the median of some."""
    source = torch.ones(
        2**22 if setting.is_quick else 2**31, dtype=torch.uint8, device=setting.device
    )
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        began_at = now(setting)
        target.copy_(source)
        seconds.append(now(setting) - began_at)
    return 2 * source.nbytes / statistics.median(seconds[1:])


def measure_kind(setting: Setting, kind: str, bandwidth: float) -> Iterator[Decode]:
    """Decode at each batch with graphs, and one sequence without."""
    model = model_of(setting.shape(LLAMA_1B))
    for captures, batches in ((True, BATCHES), (False, BATCHES[:1])):
        options = DecoderOptions(
            block_size=BLOCK_SIZE,
            num_positions=2 * CONTEXT,
            max_num_seqs=max(BATCHES),
            dtype=torch.bfloat16,
            device=setting.device,
            captures=captures,
        )
        decoder = CudaDecoder(RandomWeights(kind, setting.device), model, options)
        for batch in batches:
            yield measure_decode(setting, kind, decoder, batch, bandwidth)
        del decoder


def measure_decode(
    setting: Setting, kind: str, decoder: CudaDecoder, batch: int, bandwidth: float
) -> Decode:
    """A step with everything that the host does for it, as the engine would call it."""
    table_blocks = 2 * CONTEXT // BLOCK_SIZE
    cache = torch.zeros(
        (decoder.model.num_layers, 1 + batch * table_blocks, *decoder.block_shape(BLOCK_SIZE)),
        dtype=torch.bfloat16,
        device=setting.device,
    )
    tables = [
        [1 + row * table_blocks + block for block in range(table_blocks)] for row in range(batch)
    ]
    seconds = []
    for position in range(CONTEXT, CONTEXT + setting.num_steps + 3):
        step = Step([7] * batch, [Span(position, 1, table) for table in tables], range(batch))
        began_at = now(setting)
        best = decoder.compute(step, cache).argmax(-1).tolist()
        seconds.append(now(setting) - began_at)
    if len(best) != batch:
        raise RuntimeError(f"{len(best)} answers for {batch} sequences.")
    step_s = statistics.median(seconds[3:])
    kv_bytes = batch * CONTEXT * cache[:, 0].nbytes // BLOCK_SIZE
    step_bytes = decoder.maker.num_bytes + kv_bytes
    return Decode(
        kind=kind,
        kernel=decoder.describe_numerics()["kernel"],
        batch=batch,
        graphs=decoder.graphs.num_captured > 0,
        step_ms=1e3 * step_s,
        tokens_per_s=batch / step_s,
        step_bytes=step_bytes,
        bandwidth_fraction=step_bytes / step_s / bandwidth,
    )


def measure_engine(setting: Setting) -> dict[int, float]:
    """Output tokens per second of the whole engine: greedy, prompts of 64 tokens, prefill counted."""
    with tempfile.TemporaryDirectory() as root:
        artifact = write_tiny(Path(root), context_length=1024, **setting.shape(SMOL_135M))
        engine = LLMEngine.load(EngineConfig(artifact, device=setting.device.type, num_threads=1))
    engine.warm_up()
    say(f"engine kernel {engine.kernel}")
    run_engine(engine, max(BATCHES), 2)
    return {batch: run_engine(engine, batch, 2 * setting.num_steps) for batch in BATCHES}


def run_engine(engine: LLMEngine, batch: int, num_tokens: int) -> float:
    """``batch`` requests at once; a short run before has captured what it can."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = [(number * 31 + place * 7) % 250 for place in range(64)]
        engine.add_request(f"{batch}-{num_tokens}-{number}", prompt, sampling)
    began_at, count = time.perf_counter(), 0
    while engine.has_unfinished:
        count += len(engine.step())
    return round(count / (time.perf_counter() - began_at), 1)


def model_of(shape: Mapping[str, Any]) -> ModelConfig:
    """A model of this shape with tied embeddings."""
    return ModelConfig(
        family="llama",
        context_length=4 * CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        eos_token_ids=(2,),
        tie_word_embeddings=True,
        **shape,
    )


def now(setting: Setting) -> float:
    """The time when the device has done what it was told."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    return time.perf_counter()


def write(report: Mapping[str, Any]) -> None:
    """To the output, and to the folder that comes back from a lent machine."""
    text = json.dumps(report)
    say(text)
    if folder := os.environ.get("OUT"):
        (Path(folder) / "gpu.json").write_text(text, encoding="utf-8")


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
