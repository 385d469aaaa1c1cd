"""How tokens are chosen: the parameters of a request, checked where they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # by a version


class InvalidParameter(ValueError):
    """A sampling parameter out of range; ``name`` is the one to mend."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class FinishReason(StrEnum):
    """Why a request produced its last token."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    ``max_tokens`` None means: as many as the context has room for. ``top_k`` 0 and ``min_p`` 0 are off.
    ``seed`` None draws a fresh one per request. ``presence_penalty`` and ``frequency_penalty`` count output
    tokens, ``repetition_penalty`` prompt and output.

    ``logprobs`` None is off; else each token comes with its log-probability and those of so many of the best ones
    beside it. They are the model's own: the logarithm of the softmax of its logits as they are, before any bias,
    penalty, temperature or cut.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_is_open=True)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_stop()
        self._check_logit_bias()

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter(
                "stop", f"stop has {len(self.stop)} strings; send at most {MAX_STOP_STRINGS}."
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidParameter(
                    "stop",
                    f"a stop string has {len(text)} characters; send 1 to {MAX_STOP_LENGTH}.",
                )

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter(
                "logit_bias",
                f"logit_bias has {len(self.logit_bias)} tokens; send at most {MAX_LOGIT_BIAS}.",
            )
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise InvalidParameter("logit_bias", f"logit_bias token {token_id} is negative.")
            _check_range("logit_bias", bias, -100.0, 100.0)


def _check_range(
    name: str, value: float, low: float, high: float, *, low_is_open: bool = False
) -> None:
    inside = low < value <= high if low_is_open else low <= value <= high
    if not math.isfinite(value) or not inside:
        bound = "greater than" if low_is_open else "at least"
        raise InvalidParameter(
            name, f"{name}={value} is out of range; it must be {bound} {low} and at most {high}."
        )
