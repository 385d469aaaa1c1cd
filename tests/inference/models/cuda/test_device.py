"""What a device is asked before anything is put on it."""

from __future__ import annotations

import sys

import pytest
import torch

from inference.models.attention import AttentionShape
from inference.models.cuda.attention import GatherAttention
from inference.models.cuda.device import describe_device, free_bytes
from inference.models.cuda.flash_infer import (
    FlashInferAttention,
    FlashInferUnavailable,
    choose_attention,
)

CUDA = torch.device("cuda")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)


def test_what_the_allocator_keeps_and_nobody_uses_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    assert free_bytes(CUDA) == 1400


def test_a_device_is_described_by_name_capability_and_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    facts = describe_device(CUDA)
    assert (facts["processor"], facts["capability"]) == ("NVIDIA H200", "9.0")
    assert facts["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("device", "head_dim", "dtype", "reason"),
    [
        ("cpu", 64, torch.bfloat16, "does not run on cpu"),
        ("cuda", 80, torch.bfloat16, "heads of 80"),
        ("cuda", 64, torch.float32, "no torch.float32"),
    ],
)
def test_flashinfer_says_what_it_cannot_do(
    device: str, head_dim: int, dtype: torch.dtype, reason: str
) -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=16)
    with pytest.raises(FlashInferUnavailable, match=reason):
        FlashInferAttention(shape, dtype=dtype, device=torch.device(device), max_blocks=4)


def test_without_flashinfer_torch_attends_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with caplog.at_level("INFO"):
        attention = choose_attention(SHAPE, dtype=torch.bfloat16, device=CUDA, max_blocks=4)
    assert isinstance(attention, GatherAttention)
    assert "flashinfer" in caplog.text
    assert "pip install tatkal[cuda]" in caplog.text
