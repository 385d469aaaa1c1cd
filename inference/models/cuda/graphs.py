"""Decode steps replayed from CUDA graphs: one graph for each number of rows and each width of their block tables.

Hundreds of small kernels are launched by one call, so that a step takes what the device takes. A graph is captured when its
bucket first occurs, and reads one static buffer. It also keeps the cache's address: when the cache moves, all are captured again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.models.cuda.attention import Attention, DecodeAttention
from inference.models.cuda.batch import FIXED_COLUMNS, bucket_of, is_decode, pack_decode
from inference.models.step import Step

logger = logging.getLogger(__name__)

Compute = Callable[[Tensor, DecodeAttention, Tensor], Tensor]
"""Packed step, attention and cache to logits ``[num_rows, vocab_size]``; of device operations only."""


@dataclass(slots=True)
class _Bucket:
    """One shape of a step. ``graph`` is None until it is captured, and where nothing is captured."""

    packed: Tensor
    attention: DecodeAttention
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor | None = None
    is_eager: bool = False


class DecodeGraphs:
    """Runs decode steps in buckets of ``sizes`` rows; without ``captures`` by the same calls, one after the other."""

    def __init__(
        self,
        compute: Compute,
        attention: Attention,
        *,
        sizes: Sequence[int],
        device: torch.device,
        captures: bool,
    ) -> None:
        self._compute = compute
        self._attention = attention
        self._sizes = sizes
        self._device = device
        self._captures = captures
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._cache_place: tuple[object, ...] = ()
        self._pool = torch.cuda.graph_pool_handle() if captures else None

    @property
    def num_captured(self) -> int:
        """Graphs that exist."""
        return sum(bucket.graph is not None for bucket in self._buckets.values())

    def takes(self, step: Step) -> bool:
        """Whether there is a bucket for ``step``."""
        return is_decode(step) and bucket_of(len(step.spans), self._sizes) > 0

    def run(self, step: Step, cache: Tensor, block_size: int) -> Tensor:
        """Logits of all rows of a step that it ``takes``; the next step overwrites them."""
        self._forget_moved(cache)
        bucket = self._bucket_for(step)
        num_rows, width = bucket.packed.shape
        packed = pack_decode(step, block_size, num_rows=num_rows, num_columns=width - FIXED_COLUMNS)
        bucket.attention.plan(step.spans)
        # From pageable memory, so that the array may be forgotten when the call returns.
        bucket.packed.copy_(torch.from_numpy(packed))
        return self._answer(bucket, cache)[: len(step.spans)]

    def _answer(self, bucket: _Bucket, cache: Tensor) -> Tensor:
        if self._captures and bucket.graph is None and not bucket.is_eager:
            self._capture(bucket, cache)
        if bucket.graph is None or bucket.logits is None:
            return self._compute(bucket.packed, bucket.attention, cache)
        bucket.graph.replay()
        return bucket.logits

    def _bucket_for(self, step: Step) -> _Bucket:
        num_rows = bucket_of(len(step.spans), self._sizes)
        width = FIXED_COLUMNS + self._attention.count_columns(step.spans)
        if (num_rows, width) not in self._buckets:
            self._buckets[num_rows, width] = _Bucket(
                torch.zeros((num_rows, width), dtype=torch.int64, device=self._device),
                self._attention.open_decode(num_rows),
            )
        return self._buckets[num_rows, width]

    def _forget_moved(self, cache: Tensor) -> None:
        place = (cache.data_ptr(), cache.shape)
        if place != self._cache_place:
            self._buckets.clear()
            self._cache_place = place

    def _capture(self, bucket: _Bucket, cache: Tensor) -> None:
        """Capture the step whose numbers lie in the buffer; one that finds no memory stays eager."""
        started_at = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        try:
            self._compute_aside(bucket, cache)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                bucket.logits = self._compute(bucket.packed, bucket.attention, cache)
        except torch.OutOfMemoryError:
            bucket.is_eager = True
            bucket.logits = None
            logger.exception("no memory for a graph, the bucket stays eager %s", _name(bucket))
            return
        bucket.graph = graph
        logger.info("graph captured %s seconds=%.2f", _name(bucket), time.monotonic() - started_at)

    def _compute_aside(self, bucket: _Bucket, cache: Tensor) -> None:
        """Once on another stream, as capturing asks: libraries take their workspaces now. It writes what the replay writes."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._compute(bucket.packed, bucket.attention, cache)
        torch.cuda.current_stream(self._device).wait_stream(stream)


def _name(bucket: _Bucket) -> str:
    num_rows, width = bucket.packed.shape
    return f"rows={num_rows} blocks={width - FIXED_COLUMNS}"
