"""Finds the shared library of the CPU step, built with the package where a compiler was, and loads it if the CPU can.

The interface is that of ``native.h``; the structures below list the same fields in the same order.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

from inference.config import EngineConfig, InvalidConfig

logger = logging.getLogger(__name__)

INTERFACE_VERSION: Final = 1
_STEM = "_native"


class KernelUnavailable(RuntimeError):
    """The native step cannot run here; the message says what is missing."""


class Format(IntEnum):
    """How a matrix is stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT4 = 3
    INT8 = 4


class Isa(IntEnum):
    """What the processor can do; a higher one includes the lower ones."""

    NONE = 0
    AVX512_VNNI = 1
    AVX512_BF16 = 2


class Role(IntEnum):
    """Which matrix of a layer, or of the model."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    ATTENTION_OUTPUT = 3
    GATE = 4
    UP = 5
    DOWN = 6
    EMBEDDING = 7
    HEAD = 8


class Norm(IntEnum):
    """Which norm of a layer, or of the model."""

    ATTENTION = 0
    MLP = 1
    FINAL = 2


class Shape(Structure):
    """``TatkalShape``."""

    _fields_ = [
        ("vocab_size", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("kv_format", c_int32),
        ("num_positions", c_int32),
        ("rms_norm_eps", c_float),
    ]


class Matrix(Structure):
    """``TatkalMatrix``."""

    _fields_ = [
        ("format", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("stored_group", c_int32),
        ("group", c_int32),
        ("values", c_void_p),
        ("scale", c_void_p),
        ("minimum", c_void_p),
    ]


class Step(Structure):
    """``TatkalStep``."""

    _fields_ = [
        ("num_tokens", c_int32),
        ("num_spans", c_int32),
        ("num_logits", c_int32),
        ("num_blocks", c_int32),
        ("token_ids", c_void_p),
        ("span_starts", c_void_p),
        ("span_lengths", c_void_p),
        ("table_offsets", c_void_p),
        ("block_tables", c_void_p),
        ("logit_rows", c_void_p),
        ("cache", c_void_p),
        ("logits", c_void_p),
    ]


# Function: result, arguments.
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "interface_version": (c_int32, []),
    "isa": (c_int32, []),
    "kv_items_per_head": (c_int64, [c_int32, c_int32]),
    "create": (c_void_p, [POINTER(Shape), c_int32, c_int32]),
    "destroy": (None, [c_void_p]),
    "set_norm": (c_char_p, [c_void_p, c_int32, c_int32, c_void_p]),
    "set_matrix": (c_char_p, [c_void_p, c_int32, c_int32, POINTER(Matrix)]),
    "set_rope": (c_char_p, [c_void_p, c_void_p, c_void_p]),
    "finish": (c_char_p, [c_void_p]),
    "packed_bytes": (c_int64, [c_void_p]),
    "step": (c_char_p, [c_void_p, POINTER(Step)]),
    "test_linear": (c_char_p, [POINTER(Matrix), c_int32, c_int32, c_void_p, c_void_p]),
    "test_quantize": (None, [c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p]),
    "test_rms_norm": (None, [c_int32, c_int32, c_float, c_void_p, c_void_p, c_void_p]),
    "test_silu": (None, [c_int32, c_int32, c_void_p, c_void_p, c_void_p]),
    "test_rotate": (None, [c_int32, c_int32, c_void_p, c_void_p, c_void_p]),
    "read_bandwidth": (c_double, [c_int64, c_int32, c_int32]),
}


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library; calls release the interpreter lock. ``isa`` is what its models will use."""

    functions: ctypes.CDLL
    isa: Isa

    def call(self, name: str, *arguments: Any) -> Any:
        """Call ``tatkal_<name>``.

        Raises:
            RuntimeError: the function refuses; the message is its own.
        """
        result = getattr(self.functions, f"tatkal_{name}")(*arguments)
        if isinstance(result, bytes):
            raise RuntimeError(f"native {name}: {result.decode()}.")
        return result

    @property
    def name(self) -> str:
        """For logs and fingerprints: what computes, and in which order it sums."""
        return f"native/{INTERFACE_VERSION} {self.isa.name.lower().replace('_', '-')}"


@cache
def load_library() -> Library:
    """The library, loaded once per process.

    Raises:
        KernelUnavailable: it was not built, is of another version, or the CPU lacks its instructions.
    """
    path = _find()
    try:
        functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function: Callable[..., Any] = getattr(functions, f"tatkal_{name}")
            function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"{path.name} cannot be loaded: {error}") from error
    if (version := functions.tatkal_interface_version()) != INTERFACE_VERSION:
        raise KernelUnavailable(
            f"{path.name} is of version {version} instead of {INTERFACE_VERSION}; install the package again"
        )
    isa = Isa(functions.tatkal_isa())
    if isa is Isa.NONE:
        raise KernelUnavailable("the CPU lacks AVX512-VNNI")
    return Library(functions, isa)


def choose_library(config: EngineConfig) -> Library | None:
    """What the settings ask for: the native library, or None for plain torch. The log says which, and why.

    Raises:
        InvalidConfig: ``kernel='native'`` where it cannot run.
    """
    if config.kernel == "torch" or (config.kernel == "auto" and config.device != "cpu"):
        return None
    try:
        if config.device != "cpu":
            raise KernelUnavailable(f"it does not run on device={config.device!r}")
        return load_library()
    except KernelUnavailable as error:
        if config.kernel == "native":
            raise InvalidConfig(
                f"kernel='native' cannot run here: {error}. Use kernel='auto' or 'torch'."
            ) from error
        logger.warning("native kernel unavailable, plain torch instead reason=%s", error)
        return None


def _find() -> Path:
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := folder / f"{_STEM}{suffix}").is_file():
            return path
    raise KernelUnavailable("it was not built (no C++ compiler when the package was installed?)")
