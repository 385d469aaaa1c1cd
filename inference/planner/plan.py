"""One question, one answer: a model on a device, and everything that follows from it.

The command, the REST call and the page ask here, with the same names and the same errors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from inference.planner import batching, memory, queueing, roofline
from inference.planner.hardware import Device
from inference.planner.queueing import Load, Service
from inference.planner.roofline import Roofline
from inference.planner.shape import (
    KV_FORMATS,
    WHAT_IFS,
    ModelShape,
    check_range,
    parse_format,
    weight_bytes,
)

MAX_CONTEXT = 10**7
WHAT_IF_CONTEXTS = (2048, 4096, 8192)
STANDBY_KV_BYTES = 64 * memory.MIB


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. ``batch`` 0 means: as many sequences as fit.

    A ``load`` asks for replicas. ``lengths`` are those of answers to be batched; without them they are geometric with
    the mean ``output_tokens``.
    """

    device: Device
    shape: ModelShape
    weights: str = "fp16"
    kv: str = "fp16"
    context: int = 2048
    block_size: int = 16
    group_size: int = 0
    headroom: float = 0.0
    batch: int = 0
    prompt_tokens: int = 512
    output_tokens: int = 128
    price_per_hour: float = 0.0
    with_standby: bool = False
    load: Load | None = None
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parse_format("weights", self.weights)
        parse_format("kv", self.kv, KV_FORMATS)
        check_range("context", self.context, low=1, high=MAX_CONTEXT)
        check_range("block_size", self.block_size, low=1, high=4096)
        check_range("group_size", self.group_size, low=0, high=65536)
        check_range("headroom", self.headroom, low=0, high=memory.MAX_HEADROOM)
        check_range("batch", self.batch, low=0, high=10**6)
        check_range("prompt_tokens", self.prompt_tokens, low=1, high=MAX_CONTEXT)
        check_range("output_tokens", self.output_tokens, low=1, high=MAX_CONTEXT)
        check_range("price_per_hour", self.price_per_hour, low=0, high=1e6)

    @property
    def roofline(self) -> Roofline:
        """Model and formats on the device."""
        return Roofline(self.device, self.shape, self.weights, self.kv, self.group_size)

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return weight_bytes(self.shape, self.weights, self.group_size)

    @property
    def block_bytes(self) -> int:
        """One block of keys and values."""
        return self.block_size * memory.kv_bytes_per_token(self.shape, self.kv)

    @property
    def usable_bytes(self) -> float:
        """Memory of the device without what is left to others."""
        return self.device.memory_bytes * (1 - self.headroom)


@dataclass(frozen=True, slots=True)
class Price:
    """What something beside the live version takes from it."""

    num_bytes: float
    sequences_left: int
    sequences: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A row of the table: the same model with other weights and another context."""

    weights: str
    context: int
    weight_bytes: float
    free_bytes: float
    sequences: int
    decode_floor_s: float
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Cost:
    """In the currency of the price per hour."""

    per_1k_tokens: float
    per_query: float


@dataclass(frozen=True, slots=True)
class Batching:
    """What static batches of ``batch`` answers waste; ``speedup`` is of continuous batching, for given lengths only."""

    batch: int
    waste: float
    wasted_slot_steps: int | None = None
    held_slot_steps: int | None = None
    speedup: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. ``batch`` is what step time and ceiling are told for; 0 if not even one sequence fits."""

    weight_bytes: float
    free_bytes: float
    kv_bytes_per_token: int
    num_blocks: int
    sequences: int
    ridge: float
    decode_floor_s: float
    prefill_s: float
    weights_bound_batch: float
    compute_bound_batch: int | None
    batch: int
    batch_intensity: float
    intensity: float | None
    decode_s: float | None
    decode_flops_per_s: float | None
    tokens_per_s: float | None
    standby: Price | None
    candidate: Price | None
    cost: Cost | None
    service: Service | None
    batching: Batching
    what_ifs: tuple[WhatIf, ...]
    notes: tuple[str, ...]

    def to_dict(self, question: Question) -> dict[str, Any]:
        """JSON-ready, with the device and the model that it is about."""
        device = question.device
        return {
            "hardware": {
                "name": device.name,
                "title": device.title,
                "memory_bytes": device.memory_bytes,
                "bandwidth_bytes_per_s": device.bandwidth,
                "flops_per_s": device.rate(question.weights),
                "source": device.source,
                "measured_at": device.measured_at or None,
            },
            "model": asdict(question.shape),
            "weights": question.weights,
            "kv": question.kv,
            "context": question.context,
            "headroom": question.headroom,
            "queue_model": queueing.MODEL if self.service else None,
            **asdict(self),
        }


def make_plan(question: Question) -> Plan:
    """Everything that follows from the question.

    Raises:
        InvalidPlan: a limit cannot be met by any number of replicas.
    """
    roof = question.roofline
    sequences = count_sequences(question, other_bytes=0.0)
    batch = question.batch or sequences
    work = roof.decode_work(batch, question.context) if batch else None
    ceiling = roof.tokens_per_s(batch, question.context) if batch else None
    return Plan(
        weight_bytes=question.weight_bytes,
        free_bytes=question.usable_bytes - question.weight_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token(question.shape, question.kv),
        num_blocks=_num_blocks(question, other_bytes=0.0),
        sequences=sequences,
        ridge=roof.ridge,
        decode_floor_s=roof.decode_floor_s(),
        prefill_s=roof.prefill_s(question.prompt_tokens),
        weights_bound_batch=roof.weights_bound_batch(),
        compute_bound_batch=roof.compute_bound_batch(question.context),
        batch=batch,
        batch_intensity=roofline.batch_intensity(batch, question.weights),
        intensity=work.intensity if work else None,
        decode_s=roof.time_s(work) if work else None,
        decode_flops_per_s=work.flops / roof.time_s(work) if work else None,
        tokens_per_s=ceiling,
        standby=price_standby(question) if question.with_standby else None,
        candidate=price_candidate(question) if question.with_standby else None,
        cost=_cost(question, batch, ceiling),
        service=_service(question),
        batching=_batching(question, batch),
        what_ifs=what_ifs(question),
        notes=tuple(_notes(question, sequences, batch)),
    )


def count_sequences(question: Question, *, other_bytes: float) -> int:
    """Sequences of ``context`` tokens that fit beside the weights and ``other_bytes``."""
    return memory.count_sequences(
        _num_blocks(question, other_bytes=other_bytes),
        num_tokens=question.context,
        block_size=question.block_size,
    )


def price_standby(question: Question) -> Price:
    """What a warm standby of the same size costs: its weights, and the blocks that it keeps to answer at once."""
    blocks = memory.standby_blocks(
        full=10**9,
        standby_bytes=STANDBY_KV_BYTES,
        block_bytes=question.block_bytes,
        block_size=question.block_size,
    )
    num_bytes = question.weight_bytes + blocks * question.block_bytes
    left = count_sequences(question, other_bytes=num_bytes)
    return Price(num_bytes, left, count_sequences(question, other_bytes=0.0) - left)


def price_candidate(question: Question) -> Price:
    """What a candidate of the same size costs that answers as many requests as the live version, as in full shadow.

    What is left beside both weights is shared equally.
    """
    left_bytes = max(question.usable_bytes - 2 * question.weight_bytes, 0.0)
    num_bytes = question.weight_bytes + left_bytes / 2
    left = count_sequences(question, other_bytes=num_bytes)
    return Price(num_bytes, left, count_sequences(question, other_bytes=0.0) - left)


def what_ifs(question: Question) -> tuple[WhatIf, ...]:
    """The same with other weights and contexts; weights that exist are taken as they are in their own format."""
    contexts = sorted({question.context, *WHAT_IF_CONTEXTS})
    formats = dict.fromkeys((*WHAT_IFS, question.weights))
    return tuple(
        _what_if(replace(question, weights=weights, context=context, batch=0))
        if weights == question.weights
        else _what_if(
            replace(
                question,
                shape=question.shape.in_format(),
                weights=weights,
                context=context,
                batch=0,
            )
        )
        for weights in formats
        for context in contexts
    )


def _what_if(question: Question) -> WhatIf:
    sequences = count_sequences(question, other_bytes=0.0)
    roof = question.roofline
    return WhatIf(
        weights=question.weights,
        context=question.context,
        weight_bytes=question.weight_bytes,
        free_bytes=question.usable_bytes - question.weight_bytes,
        sequences=sequences,
        decode_floor_s=roof.decode_floor_s(),
        tokens_per_s=roof.tokens_per_s(sequences, question.context) if sequences else None,
    )


def _num_blocks(question: Question, *, other_bytes: float) -> int:
    free = question.usable_bytes - question.weight_bytes - other_bytes
    return memory.blocks_in(free, question.block_bytes)


def _cost(question: Question, batch: int, tokens_per_s: float | None) -> Cost | None:
    if not question.price_per_hour or tokens_per_s is None:
        return None
    return Cost(
        per_1k_tokens=roofline.cost_per_1k_tokens(question.price_per_hour, tokens_per_s),
        per_query=roofline.cost_per_query(
            question.roofline,
            price_per_hour=question.price_per_hour,
            prompt_tokens=question.prompt_tokens,
            output_tokens=question.output_tokens,
            batch=batch,
        ),
    )


def _service(question: Question) -> Service | None:
    """A slot has room for a whole request: prompt and answer."""
    if question.load is None:
        return None
    whole = replace(question, context=question.load.prompt_tokens + question.load.output_tokens)
    slots = count_sequences(whole, other_bytes=0.0)
    if question.batch:
        slots = min(slots, question.batch)
    return queueing.plan_replicas(question.load, question.roofline, slots=slots)


def _batching(question: Question, batch: int) -> Batching:
    if not question.lengths:
        batch = max(batch, 1)
        lengths = batching.geometric(question.output_tokens)
        return Batching(batch, batching.expected_waste(lengths, batch))
    batch = question.batch or len(question.lengths)
    static = batching.batch_statically(question.lengths, batch)
    continuous = batching.batch_continuously(question.lengths, batch)
    return Batching(
        batch, static.waste, static.wasted, static.held, static.num_steps / continuous.num_steps
    )


def _notes(question: Question, sequences: int, batch: int) -> list[str]:
    notes = []
    if not sequences:
        missing = question.weight_bytes + _one_sequence_bytes(question) - question.usable_bytes
        notes.append(
            f"Not one sequence of {question.context:,} tokens fits: {missing / 1e9:,.2f} GB are missing. Use narrower "
            "weights, a shorter context, or a device with more memory."
        )
    elif batch > sequences:
        notes.append(f"Only {sequences} sequences fit, so a batch of {batch} never runs.")
    if question.roofline.compute_bound_batch(question.context) is None:
        notes.append(
            f"At {question.context:,} tokens decoding never turns compute-bound: reading the keys and values of one "
            "more sequence takes longer than its multiplications."
        )
    if note := roofline.cache_note(question.device, question.roofline.streamed_bytes):
        notes.append(note)
    return notes


def _one_sequence_bytes(question: Question) -> int:
    blocks = memory.NUM_NULL_BLOCKS + memory.blocks_for(question.context, question.block_size)
    return blocks * question.block_bytes
