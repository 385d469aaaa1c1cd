"""Random quantised models: like the tiny artifact, with integer matrices in groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from inference.artifact import (
    TOKENIZER,
    WEIGHTS,
    Contents,
    NewTensor,
    read_manifest,
    write_artifact,
)
from inference.quantization.int4 import pack

Weight = npt.NDArray[np.float32]


def quantize_artifact(source: Path, root: Path, *, group: int, head: str = "int8") -> Path:
    """``source`` with its matrices rounded to int4 in groups, and embedding and head to ``head``."""
    manifest = read_manifest(source)
    tensors: list[NewTensor] = []
    for name, weight in sorted(load_file(source / WEIGHTS).items()):
        if weight.ndim == 1:
            tensors.append(_tensor(name, "F32", weight))
        elif name in ("model.embed_tokens.weight", "lm_head.weight") and head == "int8":
            tensors += _int8(name, weight, group)
        else:
            tensors += _int4(name, weight, group)
    return write_artifact(
        root,
        Contents(
            model=manifest.model,
            tensors=tensors,
            tokenizer=(source / TOKENIZER).read_text(encoding="utf-8"),
            chat_template=None,
            quantization="int4",
            stored_dtype="float32",
            num_parameters=manifest.num_parameters,
        ),
    )


def _int4(name: str, weight: Weight, group: int) -> list[NewTensor]:
    grouped = weight.reshape(weight.shape[0], -1, group)
    minimum = grouped.min(-1).astype(np.float16)
    scale = ((grouped.max(-1) - minimum) / 15).astype(np.float16)
    codes = np.rint((grouped - minimum[..., None]) / scale[..., None]).clip(0, 15)
    packed = pack(codes.astype(np.uint8).reshape(weight.shape))
    return [
        _tensor(f"{name}.int4", "U8", packed),
        _tensor(f"{name}.scale", "F16", scale),
        _tensor(f"{name}.minimum", "F16", minimum),
    ]


def _int8(name: str, weight: Weight, group: int) -> list[NewTensor]:
    grouped = weight.reshape(weight.shape[0], -1, group)
    scale = (np.abs(grouped).max(-1) / 127).astype(np.float16)
    codes = np.rint(grouped / scale[..., None]).clip(-127, 127).astype(np.int8)
    return [
        _tensor(f"{name}.int8", "I8", codes.reshape(weight.shape)),
        _tensor(f"{name}.scale", "F16", scale),
    ]


def _tensor(name: str, dtype: str, values: npt.NDArray[Any]) -> NewTensor:
    return NewTensor(name, dtype, values.shape, lambda: [values])
