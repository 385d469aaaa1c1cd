"""What an engine is told before it starts: the shape of the model, and the limits of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "native", "torch")


class InvalidConfig(ValueError):
    """A setting that cannot work; the message names it, its value, and the mend."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``kind`` is ``linear`` or ``llama3``. The last three fields belong to ``llama3`` alone.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise InvalidConfig(
                f"rope_scaling.kind={self.kind!r} is not supported; use 'linear' or 'llama3'."
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer of a supported family.

    Everything here comes with the weights and never changes for them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "context_length",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)} must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise InvalidConfig(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise InvalidConfig(f"head_dim={self.head_dim} must be even for rotary embedding.")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; ``from_dict`` gives an equal object back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from ``to_dict``; an unknown or missing name is an ``InvalidConfig``."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise InvalidConfig(f"model config has unknown fields {unknown}.")
        values = dict(data)
        values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidConfig(f"model config is incomplete: {error}.") from error


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine may use, and how it computes.

    ``num_blocks`` 0 means: as many KV blocks as fit into ``kv_cache_bytes``. ``standby_kv_bytes`` is what a version
    keeps that no route names. ``num_threads`` 0 means: one less than the machine has cores, at least one.
    ``max_model_len`` 0 means: the model's own context. ``kernel`` is ``native`` (one call per step, CPU only),
    ``torch``, or ``auto``: native where it can run on a CPU, on a CUDA device the step with graphs. ``prefix_cache`` 0 turns the reuse of blocks of equal prompts off.
    ``swap_bytes`` bound the host memory for what preempted requests had computed; 0: they compute it again.
    ``runtime`` is the digest of a version's own libraries, which its fingerprint then holds; empty under the machine's.
    """

    artifact: Path
    dtype: str = "bfloat16"
    device: str = "cpu"
    kernel: str = "auto"
    block_size: int = 16
    num_blocks: int = 0
    kv_cache_bytes: int = 512 * 2**20
    standby_kv_bytes: int = 64 * 2**20
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    long_prefill_tokens: int = 256
    max_model_len: int = 0
    num_threads: int = 0
    prefix_cache: int = 1
    swap_bytes: int = 256 * 2**20
    runtime: str = ""

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("device", DEVICES), ("kernel", KERNELS)):
            if getattr(self, name) not in known:
                raise InvalidConfig(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}."
                )
        if self.block_size & (self.block_size - 1):
            # Sums over keys go in fixed splits; in other sizes their order would depend on the sequence's length.
            raise InvalidConfig(f"block_size={self.block_size} must be a power of two.")
        for name in (
            "block_size",
            "kv_cache_bytes",
            "standby_kv_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "long_prefill_tokens",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)} must be at least 1.")
        if self.prefix_cache not in (0, 1):
            raise InvalidConfig(f"prefix_cache={self.prefix_cache} must be 0 (off) or 1 (on).")
        for name in ("num_blocks", "max_model_len", "num_threads", "swap_bytes"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"{name}={getattr(self, name)} must not be negative.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running sequence can decode."
            )

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """These settings with a version's own ``engine_options`` over them."""
        known = {field.name for field in fields(self)} - {"artifact", "device", "runtime"}
        if unknown := sorted(set(options) - known):
            raise InvalidConfig(
                f"engine options {unknown} are not known; known are {', '.join(sorted(known))}."
            )
        return replace(self, **options)

    @classmethod
    def from_env(cls, env: Mapping[str, str], *, artifact: Path) -> Self:
        """The machine's settings from ``TATKAL_ENGINE_<NAME>`` variables, defaults elsewhere."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = env.get(f"TATKAL_ENGINE_{field.name.upper()}", "")
            if field.name == "artifact" or not text:
                continue
            values[field.name] = _int(field.name, text) if field.type == "int" else text
        return cls(artifact=artifact, **values)


def _int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidConfig(
            f"TATKAL_ENGINE_{name.upper()}={text!r} must be a whole number."
        ) from error
