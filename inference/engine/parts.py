"""What an engine is made of: runner, scheduler, tokenizer, prompt encoder, put together from one artifact."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from tokenizers import Tokenizer

from inference.artifact import Manifest, verify
from inference.config import EngineConfig, InvalidConfig, ModelConfig
from inference.engine.block_pool import BlockPool
from inference.engine.kv_cache import (
    KVCache,
    bytes_per_block,
    count_blocks,
    count_standby_blocks,
)
from inference.engine.limits import SchedulerLimits
from inference.engine.memory import check_fits
from inference.engine.prompt import PromptEncoder, load_tokenizer
from inference.engine.runner import Runner
from inference.engine.scheduler import Scheduler
from inference.engine.swap import PreemptionCosts
from inference.engine.telemetry import ModelCost, Telemetry
from inference.kernels.loader import Library, choose_library
from inference.machine import available_bytes, count_processors
from inference.models.cuda.decoder import CudaDecoder, DecoderOptions
from inference.models.cuda.device import free_bytes
from inference.models.decoder import Decoder, torch_block_shape
from inference.models.native import NativeDecoder, native_block_shape
from inference.models.numerics import DTYPES, compute_dtype
from inference.models.step import StepModel
from inference.planner.memory import decoder_bytes, load_footprint, packed_decoder_bytes
from inference.planner.shape import ModelShape, parse_format

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers that the settings and the model decide; the KV blocks include the reserved one."""

    max_model_len: int
    full_blocks: int
    standby_blocks: int
    weight_bytes: int
    kv_block_bytes: int
    swap_slots: int

    @classmethod
    def of(cls, config: EngineConfig, manifest: Manifest, library: Library | None) -> Sizes:
        """Reckoned, before anything is allocated.

        Raises:
            InvalidConfig: the settings and the model do not go together.
        """
        model, max_model_len = manifest.model, _max_model_len(config, manifest.model)
        block_bytes = bytes_per_block(
            model.num_layers, _block_shape(config, model, library), DTYPES[config.dtype]
        )
        full = count_blocks(config, max_model_len=max_model_len, bytes_per_block=block_bytes)
        return cls(
            max_model_len=max_model_len,
            full_blocks=full,
            standby_blocks=count_standby_blocks(
                config, num_blocks=full, bytes_per_block=block_bytes
            ),
            weight_bytes=_weight_bytes(config, manifest, max_model_len, library),
            kv_block_bytes=block_bytes,
            swap_slots=config.swap_bytes // block_bytes,
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one engine, its KV cache at the size of a standby."""

    runner: Runner
    scheduler: Scheduler
    pool: BlockPool
    tokenizer: Tokenizer
    encoder: PromptEncoder
    model: ModelConfig
    sizes: Sizes
    telemetry: Telemetry
    fingerprint: str
    generation_defaults: Mapping[str, Any]


def load_parts(config: EngineConfig) -> Parts:
    """The parts of ``config.artifact``, with every file checked against its digest.

    Torch's number of threads is set for the whole process.

    Raises:
        BrokenArtifact: the artifact is damaged or incomplete.
        InvalidConfig: the settings and the model do not go together.
        NotEnoughMemory: it does not fit beside what runs already; nothing was allocated.
    """
    started_at = time.monotonic()
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device='cuda' needs a CUDA device and torch built for it; use 'cpu'.")
    num_threads = config.num_threads or max(count_processors() - 1, 1)
    torch.set_num_threads(num_threads)
    library = choose_library(config)
    manifest = verify(config.artifact)
    sizes = Sizes.of(config, manifest, library)
    _check_memory(manifest.model, sizes, device)
    verified_at = time.monotonic()
    tokenizer = load_tokenizer(config.artifact)
    pool = BlockPool(sizes.standby_blocks, config.block_size, max_num_blocks=sizes.full_blocks)
    model = _load_model(config, manifest, sizes, library, num_threads)
    parts = Parts(
        runner=_new_runner(config, model, sizes, tokenizer, manifest.model),
        scheduler=_new_scheduler(config, manifest, sizes, pool),
        pool=pool,
        tokenizer=tokenizer,
        encoder=PromptEncoder.load(config.artifact, tokenizer),
        model=manifest.model,
        sizes=sizes,
        telemetry=_new_telemetry(config, manifest, sizes, library),
        fingerprint=_fingerprint(config, manifest, model.describe_numerics()),
        generation_defaults=manifest.generation_defaults,
    )
    logger.info(
        "engine loaded artifact=%s fingerprint=%s kernel=%s threads=%d max_model_len=%d kv_blocks=%d to %d "
        "verified_in_s=%.2f loaded_in_s=%.2f",
        *(config.artifact.name, parts.fingerprint, model.describe_numerics()["kernel"]),
        *(num_threads, sizes.max_model_len),
        *(sizes.standby_blocks, sizes.full_blocks),
        *(verified_at - started_at, time.monotonic() - verified_at),
    )
    return parts


def uses_cuda_step(config: EngineConfig) -> bool:
    """Whether the step with CUDA graphs computes; the same device with ``kernel='torch'`` has plain torch."""
    return config.device == "cuda" and config.kernel == "auto"


def _check_memory(model: ModelConfig, sizes: Sizes, device: torch.device) -> None:
    kv_bytes = sizes.standby_blocks * sizes.kv_block_bytes
    needed = load_footprint(model, weight_bytes=sizes.weight_bytes, kv_bytes=kv_bytes)
    check_fits(needed, available_bytes() if device.type == "cpu" else free_bytes(device))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.context_length:
        raise InvalidConfig(
            f"max_model_len={config.max_model_len} is more than the model's context of {model.context_length}."
        )
    return config.max_model_len or model.context_length


def _block_shape(
    config: EngineConfig, model: ModelConfig, library: Library | None
) -> tuple[int, ...]:
    if library is None:
        return torch_block_shape(model, config.block_size)
    return native_block_shape(library, model, config.block_size)


def _weight_bytes(
    config: EngineConfig, manifest: Manifest, max_model_len: int, library: Library | None
) -> int:
    if library is not None and manifest.quantization != "none":
        return manifest.size_bytes  # packed as they are stored
    dtype = DTYPES[config.dtype]
    if _keeps_integers(config, manifest, library):
        return packed_decoder_bytes(
            manifest.model,
            stored_bytes=manifest.size_bytes,
            item_size=dtype.itemsize,
            num_positions=max_model_len,
        )
    computed = dtype if library else compute_dtype(dtype, torch.device(config.device))
    return decoder_bytes(manifest.model, item_size=computed.itemsize, num_positions=max_model_len)


def _keeps_integers(config: EngineConfig, manifest: Manifest, library: Library | None) -> bool:
    """Whether quantised weights are computed with as they are stored."""
    if manifest.quantization == "none":
        return False
    return library is not None or (uses_cuda_step(config) and config.dtype == "bfloat16")


def _load_model(
    config: EngineConfig,
    manifest: Manifest,
    sizes: Sizes,
    library: Library | None,
    num_threads: int,
) -> StepModel:
    dtype = DTYPES[config.dtype]
    if uses_cuda_step(config):
        return CudaDecoder.load(
            config.artifact,
            manifest,
            DecoderOptions(
                block_size=config.block_size,
                num_positions=sizes.max_model_len,
                max_num_seqs=config.max_num_seqs,
                dtype=dtype,
                device=torch.device(config.device),
            ),
        )
    if library is None:
        return Decoder.load(
            config.artifact,
            manifest,
            num_positions=sizes.max_model_len,
            dtype=dtype,
            device=torch.device(config.device),
        )
    return NativeDecoder.load(
        config.artifact,
        manifest,
        library=library,
        block_size=config.block_size,
        num_positions=sizes.max_model_len,
        dtype=dtype,
        num_threads=num_threads,
    )


def _new_runner(
    config: EngineConfig,
    step_model: StepModel,
    sizes: Sizes,
    tokenizer: Tokenizer,
    model: ModelConfig,
) -> Runner:
    cache = KVCache(
        num_layers=model.num_layers,
        num_blocks=sizes.standby_blocks,
        block_shape=step_model.block_shape(config.block_size),
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
    )
    num_token_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Runner(step_model, cache, num_token_ids=num_token_ids)


def _new_scheduler(
    config: EngineConfig, manifest: Manifest, sizes: Sizes, pool: BlockPool
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_tokens=config.long_prefill_tokens,
        max_model_len=sizes.max_model_len,
        eos_token_ids=frozenset(manifest.model.eos_token_ids),
    )
    return Scheduler(
        limits,
        pool,
        version=manifest.digest if config.prefix_cache else None,
        costs=PreemptionCosts(sizes.kv_block_bytes),
    )


def _new_telemetry(
    config: EngineConfig, manifest: Manifest, sizes: Sizes, library: Library | None
) -> Telemetry:
    shape = ModelShape.of_config(
        manifest.model, params=manifest.num_parameters, weight_bytes=sizes.weight_bytes
    )
    cost = ModelCost.of(
        manifest.model, shape, kv_bytes_per_token=sizes.kv_block_bytes / config.block_size
    )
    is_packed = _keeps_integers(config, manifest, library)
    weights = manifest.quantization if is_packed else config.dtype
    return Telemetry(cost, weights=parse_format("weights", weights))


def _fingerprint(config: EngineConfig, manifest: Manifest, numerics: Mapping[str, str]) -> str:
    """A digest over all that may change a token: the model, its text, the arithmetic, the machine."""
    facts = {
        "model": manifest.model.to_dict(),
        "weights": manifest.weights_digest,
        "tokenizer": manifest.tokenizer_digest,
        "chat_template": manifest.chat_template_digest,
        "generation_defaults": dict(manifest.generation_defaults),
        "tokenizers": version("tokenizers"),
        "jinja2": version("jinja2"),
        "block_size": config.block_size,
        **numerics,
    }
    if config.runtime:
        facts["runtime"] = config.runtime
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
