"""Which quantizations a stored weight may have, and by which tensors each is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.quantization import int4

__all__ = ["SCHEMES", "Scheme"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight ``W [out, in]`` named ``w`` is stored as ``w.<part>`` for each of ``parts``.

    The first part holds the codes, the others one float16 for each row and group. ``dequantize`` takes
    the parts in this order and gives ``W`` as float32. ``num_codes_per_item`` columns share one item.
    """

    name: str
    bits: int
    parts: Mapping[str, str]  # part -> dtype, as safetensors spells it
    num_codes_per_item: int
    dequantize: Callable[..., npt.NDArray[np.float32]]

    def tensor_names(self, weight: str) -> tuple[str, ...]:
        """Names of the stored tensors of ``weight``, codes first."""
        return tuple(f"{weight}.{part}" for part in self.parts)

    def read(self, weight: str, tensors: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """The weight ``[out, in]`` in float32, from the stored ``tensors`` by name."""
        return self.dequantize(*(tensors[name] for name in self.tensor_names(weight)))


SCHEMES: Mapping[str, Scheme] = {
    "int4": Scheme(
        name="int4",
        bits=4,
        parts={"int4": "U8", "scale": "F16", "minimum": "F16"},
        num_codes_per_item=2,
        dequantize=int4.dequantize,
    ),
    "int8": Scheme(
        name="int8",
        bits=8,
        parts={"int8": "I8", "scale": "F16"},
        num_codes_per_item=1,
        dequantize=int4.dequantize_int8,
    ),
}
