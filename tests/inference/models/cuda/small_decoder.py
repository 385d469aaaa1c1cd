"""Small random models for the tests of the CUDA step, and steps of several sequences at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.artifact import read_manifest
from inference.models.attention import Span
from inference.models.cuda.decoder import CudaDecoder, DecoderOptions
from inference.models.decoder import Decoder
from inference.models.step import Step, StepModel

CPU = torch.device("cpu")
NUM_BLOCKS = 280
NUM_POSITIONS = 600
VOCAB_SIZE = 320

SHAPE: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}


def cuda_decoder(
    artifact: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    captures: bool = False,
    max_num_seqs: int = 8,
    block_size: int = 16,
) -> CudaDecoder:
    """The step of a CUDA device, by default on the CPU and without graphs."""
    options = DecoderOptions(
        block_size, NUM_POSITIONS, max_num_seqs, dtype=dtype, device=device, captures=captures
    )
    return CudaDecoder.load(artifact, read_manifest(artifact), options)


def plain_decoder(artifact: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Plain torch on the CPU, in float32 on weights rounded to ``dtype``."""
    manifest = read_manifest(artifact)
    return Decoder.load(artifact, manifest, num_positions=NUM_POSITIONS, dtype=dtype, device=CPU)


def tokens(count: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    return torch.randint(250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(slots=True)
class Sequences:
    """A cache, and in it sequences whose blocks lie scattered; what nobody wrote is no number."""

    model: StepModel
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    block_size: int = 16
    num_layers: int = 2
    cache: Tensor = field(init=False)
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.num_layers, NUM_BLOCKS, *self.model.block_shape(self.block_size))
        self.cache = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
        self.cache[:, 0] = 0.0  # the block that nobody writes
        order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(0)) + 1
        self._free = order.tolist()

    _free: list[int] = field(default_factory=list)

    def extend(self, rows: Mapping[int, Sequence[int]]) -> Tensor:
        """Logits of each sequence's last new token, in the order of ``rows``, on the CPU."""
        spans = [self._span(name, len(new)) for name, new in rows.items()]
        ids = [token for new in rows.values() for token in new]
        ends = torch.tensor([len(new) for new in rows.values()]).cumsum(0) - 1
        return self.model.compute(Step(ids, spans, ends.tolist()), self.cache).cpu()

    def _span(self, name: int, count: int) -> Span:
        start = self.lengths.get(name, 0)
        self.lengths[name] = start + count
        table = self.tables.setdefault(name, [])
        while len(table) * self.block_size < start + count:
            table.append(self._free.pop())
        return Span(start, count, table)


def run_script(sequences: Sequences) -> list[Tensor]:
    """Prompts of many lengths, decode in batches of many sizes, both in one step; the logits of each step."""
    steps: list[dict[int, list[int]]] = [
        {0: tokens(5), 1: tokens(130, 2), 2: tokens(64, 3)},
        {0: [7], 1: [8], 2: [9]},
        {3: tokens(1, 4), 0: [11], 4: tokens(17, 5), 2: [12]},
        *({name: [20 + step + name] for name in range(5)} for step in range(3)),
        {0: [3]},
        {1: tokens(260, 6)},
        {name: [40 + name] for name in (4, 1, 0)},
    ]
    return [sequences.extend(step) for step in steps]
