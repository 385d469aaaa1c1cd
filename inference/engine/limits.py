"""What one step may hold, where a sequence ends, and what is said to a request that can never fit."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from inference.config import InvalidConfig
from inference.engine.request import Request, RequestRefused
from inference.protocol import Failure


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold, and where a sequence ends.

    ``long_prefill_tokens`` caps the tokens of one request in one step, so that a long prompt neither stretches the
    step for those that decode nor takes the whole budget. ``max_model_len`` counts prompt and output. A request waits
    for another that is computing the beginning of its prompt if that saves it ``worth_waiting_tokens``; fewer are
    computed sooner than waited for.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    worth_waiting_tokens: int = 64

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "long_prefill_tokens",
            "max_model_len",
            "worth_waiting_tokens",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)} must be at least 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running sequence can decode."
            )


def resolve_max_tokens(request: Request, limits: SchedulerLimits, num_slots: int) -> int:
    """How many output tokens ``request`` may have in a pool of ``num_slots`` tokens.

    Raises:
        RequestRefused: it can never fit; the numbers and the mend are said.
    """
    num_prompt_tokens, param = request.num_prompt_tokens, request.prompt_param
    if num_prompt_tokens < 1:
        raise _refusal("empty_prompt", param, "The prompt has no tokens.")
    room = min(limits.max_model_len, num_slots) - num_prompt_tokens
    asked = request.sampling.max_tokens
    if room < 1:
        raise _too_long(
            param,
            f"{param} has {num_prompt_tokens} tokens and the answer needs at least 1, "
            f"but {_describe(limits, num_slots)}. Shorten {param} by at least {1 - room} tokens.",
        )
    if asked is not None and asked > room:
        raise _too_long(
            "max_tokens",
            f"{param} has {num_prompt_tokens} tokens and max_tokens={asked}, "
            f"together {num_prompt_tokens + asked}, but {_describe(limits, num_slots)}. "
            f"Lower max_tokens to at most {room}, or shorten {param}.",
        )
    return room if asked is None else asked


def _describe(limits: SchedulerLimits, num_slots: int) -> str:
    context = limits.max_model_len
    if context <= num_slots:
        return f"the context holds {context}"
    return f"the KV cache of this engine holds {num_slots} (the context {context})"


def _too_long(param: str, message: str) -> RequestRefused:
    return _refusal("context_length_exceeded", param, message)


def _refusal(code: str, param: str, message: str) -> RequestRefused:
    return RequestRefused(Failure(code, message, HTTPStatus.BAD_REQUEST, param))
