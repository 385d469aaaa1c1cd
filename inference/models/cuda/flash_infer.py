"""Attention by FlashInfer (``pip install tatkal[cuda]``), which reads keys and values where they lie.

Source: Ye et al. (2025), "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving",
arXiv:2501.01005; calls as in flashinfer-python 0.7.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from inference.models.attention import AttentionShape, Span
from inference.models.cuda.attention import Attend, Attention, DecodeAttention, GatherAttention
from inference.models.cuda.batch import Int32s, Pages

logger = logging.getLogger(__name__)

_WORKSPACE_BYTES = 128 * 2**20
_LAYOUT = "HND"
_HEAD_DIMS = (64, 128, 256)
_BACKEND = "fa2"
"""One for every plan, so that a graph and its plan agree whatever the lengths."""


class FlashInferUnavailable(RuntimeError):
    """FlashInfer cannot serve this model here; the message says why."""


def choose_attention(
    shape: AttentionShape, *, dtype: torch.dtype, device: torch.device, max_blocks: int
) -> Attention:
    """FlashInfer where it can run, else torch alone. The log says which, and why."""
    try:
        return FlashInferAttention(shape, dtype=dtype, device=device, max_blocks=max_blocks)
    except FlashInferUnavailable as reason:
        logger.info("attention by torch, keys and values are gathered reason=%s", reason)
        return GatherAttention(shape, device)


class FlashInferAttention:
    """Both steps by FlashInfer; ``max_blocks`` is what one sequence can have.

    Raises:
        FlashInferUnavailable: the package, the device, the head's size or the dtype do not fit.
    """

    def __init__(
        self, shape: AttentionShape, *, dtype: torch.dtype, device: torch.device, max_blocks: int
    ) -> None:
        self.library = _load(shape, dtype, device)
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.max_blocks = max_blocks
        # One for all: steps follow one another on one stream. Zero at first, as the library asks.
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = self.library.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, _LAYOUT, backend=_BACKEND
        )

    @property
    def name(self) -> str:
        """With its release, which may change the order of a sum."""
        return f"flashinfer {version('flashinfer-python')} {_BACKEND}"

    def plan(self, spans: Sequence[Span]) -> Attend:
        """As ``Attention.plan``: prompts and decoding sequences in one ragged call."""
        shape, pages = self.shape, Pages.of(spans, self.shape.block_size)
        self._prefill.plan(
            *map(_host, (pages.query_ends, pages.page_ends, pages.pages, pages.last_lengths)),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        return _attend_with(self._prefill)

    def count_columns(self, _spans: Sequence[Span], /) -> int:
        """None: pages are handed over when a step is planned."""
        return 0

    def open_decode(self, num_rows: int) -> DecodeAttention:
        """As ``Attention.open_decode``, with buffers that a graph may keep."""
        return _FlashInferDecode(self, num_rows)


class _FlashInferDecode:
    def __init__(self, attention: FlashInferAttention, num_rows: int) -> None:
        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=attention.device)

        self._attention = attention
        self._num_rows = num_rows
        self._wrapper = attention.library.BatchDecodeWithPagedKVCacheWrapper(
            attention.workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(num_rows + 1),
            paged_kv_indices_buffer=buffer(num_rows * attention.max_blocks),
            paged_kv_last_page_len_buffer=buffer(num_rows),
            backend=_BACKEND,
        )

    def plan(self, spans: Sequence[Span]) -> None:
        """Bring the lists of pages into the buffers, and decide how the work is split."""
        attention, shape = self._attention, self._attention.shape
        pages = Pages.of(spans, shape.block_size, num_rows=self._num_rows)
        self._wrapper.plan(
            *map(_host, (pages.page_ends, pages.pages, pages.last_lengths)),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            q_data_type=attention.dtype,
            kv_data_type=attention.dtype,
        )

    def bind(self, _positions: Tensor, _tables: Tensor, /) -> Attend:
        """What was planned last, whatever the graph's own buffer says."""
        return _attend_with(self._wrapper)


def _attend_with(wrapper: Any) -> Attend:
    def attend(layer_cache: Tensor, queries: Tensor) -> Tensor:
        answers: Tensor = wrapper.run(queries.contiguous(), layer_cache)
        return answers.flatten(1)

    return attend


def _load(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Any:
    if device.type != "cuda":
        raise FlashInferUnavailable(f"it does not run on {device.type}")
    if shape.head_dim not in _HEAD_DIMS:
        raise FlashInferUnavailable(f"heads of {shape.head_dim} are none of {_HEAD_DIMS}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise FlashInferUnavailable(f"it has no {dtype}")
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise FlashInferUnavailable(f"{error}; pip install tatkal[cuda]") from error


def _host(numbers: Int32s) -> Tensor:
    return torch.from_numpy(numbers)
