"""What a CUDA device says of itself, and how it is made to compute the same thing twice."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """What this process may still take of a CUDA device; what torch's allocator keeps and nobody uses counts as free."""
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)


def settle_arithmetic(device: torch.device) -> None:
    """Float32 products in float32 and not TF32, sums of narrow products in float32; for the whole process."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def describe_device(device: torch.device) -> dict[str, str]:
    """Facts of the device and of its libraries that may change the last bit of a sum."""
    if device.type != "cuda":
        return {"processor": device.type, "torch": torch.__version__}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "processor": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
