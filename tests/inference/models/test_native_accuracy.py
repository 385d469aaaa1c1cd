"""What the arithmetic of the native step costs: perplexity on plain text against float32 on the same weights."""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inference.artifact import read_manifest
from inference.engine.prompt import load_tokenizer
from inference.models.attention import Span
from inference.models.decoder import Decoder
from inference.models.native import NativeDecoder
from inference.models.step import Step, StepModel
from tests.inference.kernels.native_calls import library

pytestmark = pytest.mark.slow

WINDOW = 512
NUM_WINDOWS = 8
NUM_LAYERS = 30
BLOCK_SIZE = 16
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Reading:
    """How a model reads a text: log-probabilities of every token in each place, ``[num_places, vocab_size]``."""

    log_probs: Tensor
    perplexity: float


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    library()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def windows(real_artifact: Path) -> list[list[int]]:
    """Pieces of English that every Python comes with."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = load_tokenizer(real_artifact).encode(text[:200_000], add_special_tokens=False).ids
    return [ids[3 * at : 3 * at + WINDOW] for at in range(0, NUM_WINDOWS * WINDOW, WINDOW)]


@pytest.fixture(scope="module")
def bf16_artifact(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, dequantised and rounded to bfloat16."""
    root = tmp_path_factory.mktemp("bf16")
    command = [sys.executable, "-m", "inference.importers", "gguf", str(gguf_path)]
    process = subprocess.run(
        [*command, "--root", str(root), "--dtype", "bfloat16"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return Path(json.loads(process.stdout.splitlines()[-1])["artifact"])


@pytest.fixture(scope="module")
def reference(real_artifact: Path, windows: list[list[int]]) -> Reading:
    """Plain torch in float32 on the dequantised weights."""
    model = Decoder.load(
        real_artifact,
        read_manifest(real_artifact),
        num_positions=WINDOW,
        dtype=torch.float32,
        device=CPU,
    )
    return _read(model, torch.float32, windows)


@pytest.mark.parametrize(("kind", "divergence"), [("int4", 0.01), ("bf16", 0.001)])
def test_perplexity_stays_within_one_percent_of_float32(
    real_artifact: Path,
    bf16_artifact: Path,
    windows: list[list[int]],
    reference: Reading,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    divergence: float,
) -> None:
    artifact = real_artifact if kind == "int4" else bf16_artifact
    model = NativeDecoder.load(
        artifact,
        read_manifest(artifact),
        library=library(),
        block_size=BLOCK_SIZE,
        num_positions=WINDOW,
        dtype=torch.bfloat16,
        num_threads=1,
    )
    found = _read(model, torch.bfloat16, windows)
    ratio = found.perplexity / reference.perplexity
    change = reference.log_probs - found.log_probs
    kl = (reference.log_probs.exp() * change).sum(-1).mean().item()
    agree = found.log_probs.argmax(-1) == reference.log_probs.argmax(-1)
    top_1 = agree.float().mean().item()
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{kind}: {len(agree)} tokens, perplexity {found.perplexity:.3f} against "
            f"{reference.perplexity:.3f} ({ratio:.4f}x), KL {kl:.5f}, same best token {top_1:.4f}"
        )
    assert abs(ratio - 1) < 0.01
    assert kl < divergence
    assert top_1 > 0.95


@torch.inference_mode()
def _read(model: StepModel, dtype: torch.dtype, windows: Sequence[Sequence[int]]) -> Reading:
    num_blocks = WINDOW // BLOCK_SIZE
    cache = torch.zeros((NUM_LAYERS, 1 + num_blocks, *model.block_shape(BLOCK_SIZE)), dtype=dtype)
    parts, loss = [], 0.0
    for tokens in windows:
        step = Step(tokens, [Span(0, WINDOW, range(1, 1 + num_blocks))], range(WINDOW - 1))
        log_probs = model.compute(step, cache).log_softmax(-1)
        following = torch.tensor(tokens[1:])[:, None]
        loss -= log_probs.gather(1, following).sum().item()
        parts.append(log_probs)
    log_probs = torch.cat(parts)
    return Reading(log_probs, math.exp(loss / log_probs.shape[0]))
