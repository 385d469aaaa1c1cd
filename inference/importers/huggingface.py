"""A local Hugging Face directory of the Llama family -> our artifact.

Weights are read from safetensors alone, and nothing in the directory is ever run (``ModelDirectory``). What our
decoder does not compute is refused by name, because a model with a part left out still answers, only worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.artifact import (
    BrokenArtifact,
    Contents,
    NewTensor,
    Progress,
    no_progress,
    write_artifact,
)
from inference.config import InvalidConfig, ModelConfig, RopeScaling
from inference.importers.checkpoint import (
    EMBEDDING,
    HEAD,
    STORED_DTYPES,
    check_chat_template,
    check_limits,
    check_tensors,
    check_tokenizer,
    count_parameters,
    encode,
    from_bfloat16,
    read_rows,
    with_end_of_turn,
)
from inference.importers.directory import ModelDirectory
from inference.importers.safetensors_header import StoredTensor, read_header
from inference.importers.tokenizer import load_tokenizer
from inference.protocol import DEFAULTABLE, InvalidParameter, SamplingParams

ARCHITECTURE = "LlamaForCausalLM"

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = ("F32", "F16", "BF16")
# What the Llama class can be told to do and our decoder does not: field -> the one value it may have.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
# Rotary frequencies that old exporters saved; they follow from the configuration.
_COMPUTED = ".self_attn.rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor lies: a file, and the place in it."""

    path: Path
    tensor: StoredTensor


def import_huggingface(
    directory: Path,
    root: Path,
    *,
    dtype: str = "bfloat16",
    progress: Progress = no_progress,
) -> Path:
    """The artifact under ``root`` made of the model in ``directory``, weights stored in ``dtype``.

    Raises:
        BrokenArtifact: the directory is unsafe, damaged, incomplete, or holds a model that is not supported.
    """
    source = ModelDirectory(directory)
    config = read_config(source)
    check_limits(_CONFIG, config)
    tokenizer, tokenizer_json = load_tokenizer(source.text(_TOKENIZER), _TOKENIZER)
    template = _chat_template(source)
    check_chat_template(template)
    eos_ids = with_end_of_turn(_eos_ids(source), tokenizer, template)
    tensors = _find_tensors(source)
    config = replace(config, eos_token_ids=eos_ids, tie_word_embeddings=_is_tied(config, tensors))
    check_tokenizer(_CONFIG, tokenizer, config)
    check_tensors(_WEIGHTS, {name: place.tensor.shape for name, place in tensors.items()}, config)
    progress(0, len(tensors), "headers read")
    contents = Contents(
        model=config,
        tensors=[_to_store(name, place, dtype) for name, place in tensors.items()],
        tokenizer=tokenizer_json,
        chat_template=template,
        quantization="none",
        stored_dtype=dtype,
        num_parameters=count_parameters(config),
        generation_defaults=_generation_defaults(source),
        source={"format": "huggingface", "name": source.name, "sha256": source.digest()},
    )
    return write_artifact(root, contents, progress)


def read_config(source: ModelDirectory) -> ModelConfig:
    """The shape of the model from ``config.json``, with no stop tokens yet.

    Raises:
        BrokenArtifact: another architecture, a missing or impossible value, or a feature that is not supported.
    """
    config = source.json(_CONFIG)
    _check_supported(config)
    rope = _rope_parameters(config)
    num_heads, hidden_size = _int(config, "num_attention_heads"), _int(config, "hidden_size")
    bos_ids = _ids(config, "bos_token_id", _CONFIG)
    try:
        return ModelConfig(
            family="llama",
            vocab_size=_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            num_layers=_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_int(config, "num_key_value_heads", num_heads),
            head_dim=_int(config, "head_dim", hidden_size // max(num_heads, 1)),
            context_length=_int(config, "max_position_embeddings"),
            rms_norm_eps=_float(config, "rms_norm_eps", 1e-6),
            rope_theta=_float(rope, "rope_theta", _float(config, "rope_theta", 10_000.0)),
            eos_token_ids=(),
            bos_token_id=bos_ids[0] if bos_ids else None,
            tie_word_embeddings=config.get("tie_word_embeddings", False) is True,
            rope_scaling=_rope_scaling(rope),
        )
    except (InvalidConfig, ZeroDivisionError) as error:
        raise BrokenArtifact(_CONFIG, "", str(error), "Correct the configuration.") from error


def _check_supported(config: Mapping[str, Any]) -> None:
    if config.get("architectures") != [ARCHITECTURE]:
        raise _unsupported(
            "architectures", f"{config.get('architectures')!r} is not {ARCHITECTURE}."
        )
    for field, allowed in _FIXED.items():
        if config.get(field, allowed) != allowed:
            raise _unsupported(field, f"{config[field]!r} is not supported, only {allowed!r}.")


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings: ``rope_parameters`` since transformers 5, ``rope_scaling`` before."""
    for field in ("rope_parameters", "rope_scaling"):
        value = config.get(field)
        if value is not None:
            if not isinstance(value, dict):
                raise _unsupported(field, f"{str(value)[:80]} is not an object.")
            return value
    return {}


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    # The name of the kind was `type` before it was `rope_type`; some files have both.
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", _float(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            _float(rope, "factor"),
            low_freq_factor=_float(rope, "low_freq_factor"),
            high_freq_factor=_float(rope, "high_freq_factor"),
            original_context_length=_int(rope, "original_max_position_embeddings"),
        )
    raise _unsupported("rope_type", f"{kind!r} is not supported, only linear and llama3.")


def _find_tensors(source: ModelDirectory) -> dict[str, _Place]:
    """Every tensor of every shard by name; the index, where there is one, must tell the same."""
    has_index, has_single = source.has(_INDEX), source.has(_WEIGHTS)
    if has_index == has_single:
        state = "both are there" if has_index else "neither is there"
        raise BrokenArtifact(
            source.name,
            f"{_WEIGHTS}, {_INDEX}",
            f"{state}.",
            "Keep exactly one of the two, with the shards of an index beside it.",
        )
    weight_map = _weight_map(source) if has_index else {}
    shards = sorted(set(weight_map.values())) or [_WEIGHTS]
    tensors: dict[str, _Place] = {}
    for shard in shards:
        path = source.path(shard)
        for name, tensor in read_header(path, _DTYPES).items():
            if name in tensors or (weight_map and weight_map.get(name) != shard):
                raise BrokenArtifact(
                    shard, name, f"{_INDEX} does not place it here.", "Export the model again."
                )
            tensors[name] = _Place(path, tensor)
    if lost := sorted(weight_map.keys() - tensors.keys()):
        raise BrokenArtifact(
            _INDEX, lost[0], f"{weight_map[lost[0]]} does not hold it.", "Export the model again."
        )
    return {name: place for name, place in tensors.items() if not name.endswith(_COMPUTED)}


def _weight_map(source: ModelDirectory) -> dict[str, str]:
    weight_map = source.json(_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenArtifact(_INDEX, "weight_map", "missing or empty.", "Export the model again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not source.has(shard):
            raise BrokenArtifact(
                _INDEX, name, f"{shard!r} is no file of the directory.", "Copy all shards."
            )
    return weight_map


def _is_tied(config: ModelConfig, tensors: dict[str, _Place]) -> bool:
    """Whether the head is the embedding; an equal copy of it is taken out of ``tensors``.

    Without a head of its own the model is tied, whatever the configuration says. A tied one with a head that
    differs is refused: other programs would use either.
    """
    if HEAD not in tensors:
        return True
    if not config.tie_word_embeddings:
        return False
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    if embedding is not None and not _are_equal(head, embedding):
        raise BrokenArtifact(
            _CONFIG,
            "tie_word_embeddings",
            f"true, but {HEAD} differs from {EMBEDDING}.",
            f"Set it to false, or remove {HEAD}.",
        )
    del tensors[HEAD]
    return True


def _are_equal(one: _Place, other: _Place) -> bool:
    if (one.tensor.dtype, one.tensor.shape) != (other.tensor.dtype, other.tensor.shape):
        return False
    return all(
        np.array_equal(left, right) for left, right in zip(_rows(one), _rows(other), strict=True)
    )


def _rows(place: _Place) -> Iterator[npt.NDArray[np.uint8]]:
    tensor = place.tensor
    num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return read_rows(place.path, tensor.start, num_rows, tensor.num_bytes // num_rows)


def _to_store(name: str, place: _Place, dtype: str) -> NewTensor:
    return NewTensor(
        name, STORED_DTYPES[dtype], place.tensor.shape, partial(_encoded, name, place, dtype)
    )


def _encoded(name: str, place: _Place, dtype: str) -> Iterator[npt.NDArray[Any]]:
    for rows in _rows(place):
        values = _decode(rows, place.tensor.dtype)
        yield encode(values, dtype, file=place.path.name, name=name)


def _decode(rows: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return from_bfloat16(rows.view("<u2"))
    return rows.view("<f2" if dtype == "F16" else "<f4").astype(np.float32, copy=False)


def _eos_ids(source: ModelDirectory) -> tuple[int, ...]:
    # generation_config.json is what generate() obeys, and lists the ends of turns; config.json often has one id.
    generation = source.json(_GENERATION, optional=True)
    return _ids(generation, "eos_token_id", _GENERATION) + _ids(
        source.json(_CONFIG), "eos_token_id", _CONFIG
    )


def _ids(config: Mapping[str, Any], field: str, file: str) -> tuple[int, ...]:
    value = config.get(field)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in ids):
        raise BrokenArtifact(file, field, f"{value!r} is no token id.", "Correct it.")
    return tuple(ids)


def _chat_template(source: ModelDirectory) -> str | None:
    """The template for chats: a file of its own, or in ``tokenizer_config.json`` alone or as ``default``."""
    if source.has(_TEMPLATE):
        return source.text(_TEMPLATE)
    template = source.json(_TOKENIZER_CONFIG, optional=True).get("chat_template")
    if isinstance(template, list):
        named = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise BrokenArtifact(
            _TOKENIZER_CONFIG, "chat_template", "it is no text.", "Save the template as text."
        )
    return template


def _generation_defaults(source: ModelDirectory) -> dict[str, Any]:
    generation = source.json(_GENERATION, optional=True)
    defaults = {name: generation[name] for name in DEFAULTABLE if generation.get(name) is not None}
    for name, value in defaults.items():
        allowed = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise BrokenArtifact(_GENERATION, name, f"{value!r} is no number.", "Correct it.")
    try:
        SamplingParams(**defaults)
    except InvalidParameter as error:
        raise BrokenArtifact(_GENERATION, error.name, str(error), "Correct it.") from error
    return defaults


def _int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int:
        raise BrokenArtifact(_CONFIG, field, f"{value!r} is not a whole number.", "Correct it.")
    return value


def _float(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BrokenArtifact(_CONFIG, field, f"{value!r} is not a positive number.", "Correct it.")
    return float(value)


def _unsupported(field: str, problem: str) -> BrokenArtifact:
    return BrokenArtifact(
        _CONFIG, field, problem, "Import a plain Llama model.", code="unsupported_model"
    )
