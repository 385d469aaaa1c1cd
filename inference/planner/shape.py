"""What is planned: the shape of a decoder, and the formats that its weights and its keys and values are kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from inference.config import ModelConfig

BITS: Final[Mapping[str, int]] = {
    "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4,
}  # fmt: skip
"""Bits of one number in each format."""

_GROUP_BITS: Final[Mapping[str, int]] = {"int8": 16, "int4": 32}
"""What a group of integers has beside its codes: a float16 scale, and for four bits a float16 minimum."""

ALIASES: Final[Mapping[str, str]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KV_FORMATS: Final = ("fp32", "bf16", "fp16", "fp8", "int8")
WHAT_IFS: Final = ("fp16", "int8", "int4")

_HEAD_DIMS = (128, 64)
_MOST = 10**15


class InvalidPlan(ValueError):
    """A value that nothing can be planned with; ``name`` is the input, and the message has value and mend."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder-only transformer, as far as bytes and multiplications go.

    ``lookup_params`` of the ``params`` are looked up and never multiplied: an input embedding that is not the output
    head as well. ``weight_bytes`` is the size of weights that exist; 0 means that it follows from a format.
    """

    params: float
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lookup_params: float = 0
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("params", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"):  # fmt: skip
            check_range(name, getattr(self, name), low=1, high=_MOST)
        if self.num_heads % self.num_kv_heads:
            raise InvalidPlan(
                "num_kv_heads",
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}: each of them serves "
                "equally many query heads.",
            )

    @classmethod
    def of_sizes(
        cls,
        *,
        params: float,
        num_layers: int,
        hidden_size: int,
        num_heads: int = 0,
        num_kv_heads: int = 0,
        head_dim: int = 0,
    ) -> Self:
        """A shape of which only the main sizes are known; 0 means: as models of this size usually have it.

        Heads are 128 wide, or 64 where that does not divide ``hidden_size``; every query head has keys of its own.

        Raises:
            InvalidPlan: a size is out of range, or the heads do not follow from the others.
        """
        check_range("hidden_size", hidden_size, low=1, high=_MOST)
        head_dim = head_dim or _head_dim(hidden_size, num_heads)
        num_heads = num_heads or max(hidden_size // head_dim, 1)
        kv_heads = num_kv_heads or num_heads
        return cls(params, num_layers, hidden_size, num_heads, kv_heads, head_dim)

    @classmethod
    def of_config(cls, model: ModelConfig, *, params: int, weight_bytes: int = 0) -> Self:
        """The shape of a model that exists."""
        lookup = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        return cls(
            params=params,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            lookup_params=lookup if lookup < params else 0,
            weight_bytes=weight_bytes,
        )

    @property
    def computed_params(self) -> float:
        """Weights that every token is multiplied with."""
        return self.params - self.lookup_params

    @property
    def attention_width(self) -> int:
        """Width of the queries of one layer."""
        return self.num_heads * self.head_dim

    def in_format(self) -> ModelShape:
        """The same model where its weights were of another format: their size follows from that."""
        return replace(self, weight_bytes=0)


def bits_per_weight(weights: str, group_size: int = 0) -> float:
    """Bits that one weight takes; ``group_size`` 0 leaves out the scales of integer groups."""
    extra = _GROUP_BITS.get(weights, 0) / group_size if group_size else 0.0
    return BITS[weights] + extra


def weight_bytes(shape: ModelShape, weights: str, group_size: int = 0) -> float:
    """Bytes of all weights; those that exist have the size that they have."""
    return shape.weight_bytes or shape.params * bits_per_weight(weights, group_size) / 8


def parse_format(name: str, value: str, known: Mapping[str, int] | tuple[str, ...] = BITS) -> str:
    """The format that ``value`` names, torch's spelling included.

    Raises:
        InvalidPlan: there is no such format.
    """
    found = ALIASES.get(value, value)
    if found not in known:
        raise InvalidPlan(name, f"{name}={value!r} is not known; use one of {', '.join(known)}.")
    return found


def check_range(name: str, value: float, *, low: float, high: float) -> None:
    """Return if ``value`` is from ``low`` to ``high``.

    Raises:
        InvalidPlan: it is not, or is not a number.
    """
    if not low <= value <= high:
        raise InvalidPlan(name, f"{name}={_show(value)} must be from {low:g} to {high:g}.")


def _show(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # a whole number beyond all floats
        return "(a number too large to show)"


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if num_heads > 0:
        if hidden_size % num_heads:
            raise InvalidPlan(
                "num_heads",
                f"num_heads={num_heads} must divide hidden_size={hidden_size}, or head_dim must be given.",
            )
        return hidden_size // num_heads
    for usual in _HEAD_DIMS:
        if hidden_size % usual == 0:
            return usual
    raise InvalidPlan(
        "head_dim",
        f"head_dim cannot be guessed: hidden_size={hidden_size} is no multiple of 128 or 64. Give head_dim or num_heads.",
    )
