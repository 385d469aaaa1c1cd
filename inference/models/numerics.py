"""In which numbers a model is computed, and everything about a machine that may change the last bit of one."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What weights that are kept in ``dtype`` are multiplied in.

    On a CPU always float32: the weights are rounded to ``dtype``, then widened. Without AVX512-BF16 or AMX a
    bfloat16 product of 8 rows or more takes about three times as long, and it is for float32 that ``Linear`` and
    ``attend`` are known to give a row the same bits in every batch.
    """
    return torch.float32 if device.type == "cpu" else dtype


def describe_torch(dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """Facts that decide how plain torch rounds a sum; where they are equal, so are the results, bit for bit."""
    return {
        "kept_as": str(dtype),
        "computed_in": str(compute_dtype(dtype, device)),
        "kernel": "torch",
        "torch": torch.__version__,
        "num_threads": str(torch.get_num_threads()),
        "processor": _cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
    }


def _cpu_name() -> str:
    """Model and instruction sets: matrix libraries choose their kernels by both."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {capability}"
    facts = {line.split(":")[0].strip(): line for line in lines}
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    return " ".join([platform.machine(), capability, *(facts.get(name, "") for name in names)])
