"""The shape of a model from GGUF metadata; most of it is tested by whole imports, in ``test_gguf.py``."""

from __future__ import annotations

import numpy as np
import pytest

from inference.config import RopeScaling
from inference.importers.gguf_config import llama3_factors


@pytest.mark.slow
def test_the_factors_of_llama_3_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=1024, num_attention_heads=8, head_dim=128, rope_parameters=rope
    )
    rope_functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    scaled, _ = rope_functions["llama3"](config, torch.device("cpu"))

    plain = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    ours = plain / llama3_factors(RopeScaling("llama3", 8.0), 500_000.0, 128)

    assert np.allclose(ours, scaled.numpy(), rtol=1e-5, atol=0)
