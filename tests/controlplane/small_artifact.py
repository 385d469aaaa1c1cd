"""A version with an artifact on disk whose manifest can be read: the shape of a 1B model, and hardly any weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from controlplane.registry.models import Version
from inference.artifact import Contents, NewTensor, write_artifact
from inference.config import ModelConfig
from tests.factories import make_version

MODEL = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=22,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    context_length=2048,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    eos_token_ids=(2,),
)
NUM_PARAMETERS = 1_100_048_384


def make_planned_version(root: Path, **fields: Any) -> Version:
    """The next version of ``tiny``, of a 1.1B model in bfloat16."""
    tensor = NewTensor("weight", "F32", (1,), lambda: [np.ones(1, dtype=np.float32)])
    artifact = write_artifact(
        root,
        Contents(
            model=MODEL,
            tensors=[tensor],
            tokenizer="{}",
            chat_template=None,
            quantization="none",
            stored_dtype="float32",
            num_parameters=NUM_PARAMETERS,
        ),
    )
    return make_version(artifact=str(artifact), **fields)
