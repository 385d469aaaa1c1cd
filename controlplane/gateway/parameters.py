"""From an OpenAI request body to a ``GenerateRequest``, or a refusal that names the parameter.

A parameter that would change the answer is either obeyed or refused, never ignored. Null means absent, as the
OpenAI package has it. Source of names and defaults: openai 3.57, ``resources/chat/completions/completions.py``
and ``resources/completions.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from controlplane.gateway.body import (
    InvalidRequest,
    check_flag,
    check_integer,
    check_label,
    check_list,
    check_number,
    check_object,
    check_text,
    check_token_id,
    missing,
    read_object,
    refuse_unknown,
    unsupported,
)
from controlplane.gateway.messages import read_messages, read_prompt
from inference.protocol import (
    DEFAULTABLE,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    ChatMessage,
    GenerateRequest,
    InvalidParameter,
    SamplingParams,
)

MAX_MODEL_LENGTH = 256
MAX_USER_LENGTH = 512
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_LENGTH = 64
MAX_METADATA_VALUE_LENGTH = 512

COMPLETION_MAX_TOKENS = 16
"""What OpenAI's /v1/completions generates when the caller names no length."""
COMPLETION_MAX_LOGPROBS = 5
"""What OpenAI's /v1/completions shows at most beside a token."""


class Kind(StrEnum):
    """Which of the two doors a request came through."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class Call:
    """A checked body: what to generate, and how to send it."""

    kind: Kind
    request: GenerateRequest
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request gets from us and not from its body."""

    request_id: str
    key_id: str
    deadline_s: float


def parse(kind: Kind, body: bytes, origin: Origin) -> Call:
    """The call that ``body`` asks for.

    Raises:
        InvalidRequest: some parameter is missing, malformed, out of range, unknown, or not supported.
    """
    data = read_object(body)
    if data.get("cache_salt") is not None:
        # Whoever chose it could find out what other tenants' prompts begin with.
        raise InvalidRequest(
            "cache_salt is made from your API key; leave it out.",
            param="cache_salt",
            code="unsupported_parameter",
        )
    refuse_unknown("", data, _KNOWN[kind])
    for name, is_neutral in _NEUTRAL[kind].items():
        if data.get(name) is not None and not is_neutral(data[name]):
            raise unsupported(name, data[name])
    stream = _optional(data, "stream", check_flag) or False
    return Call(
        kind=kind,
        request=_read_request(kind, data, origin),
        stream=stream,
        include_usage=_read_stream_options(data, stream=stream),
    )


def sticky_key(request: GenerateRequest) -> str:
    """What keeps a caller's user, or else a conversation, on one version.

    A conversation is known by its beginning up to the first user message, which every later turn repeats. The digest
    keeps texts and names out of Redis keys and logs.
    """
    if request.user is not None:
        parts = ["user", request.key_id, request.user]
    elif request.messages is not None:
        parts = ["messages", request.key_id, *_opening(request.messages)]
    else:
        parts = ["prompt", request.key_id, str(request.prompt or request.prompt_token_ids)]
    return hashlib.sha256("\x00".join(parts).encode("utf-8")).hexdigest()


def _opening(messages: tuple[ChatMessage, ...]) -> list[str]:
    opening: list[str] = []
    for message in messages:
        opening += [message.role, message.content]
        if message.role == "user":
            break
    return opening


def _read_request(kind: Kind, data: dict[str, Any], origin: Origin) -> GenerateRequest:
    if data.get("model") is None:
        raise missing("model")
    return GenerateRequest(
        id=origin.request_id,
        endpoint=check_label("model", data["model"], longest=MAX_MODEL_LENGTH),
        sampling=_read_sampling(kind, data, origin.request_id),
        deadline_s=origin.deadline_s,
        key_id=origin.key_id,
        user=_optional(data, "user", _check_user),
        metadata=_optional(data, "metadata", _check_metadata) or {},
        unset=tuple(name for name in DEFAULTABLE if data.get(name) is None),
        n=_read_n(data),
        cache_salt=origin.key_id,
        **_read_input(kind, data),
    )


def _read_input(kind: Kind, data: dict[str, Any]) -> dict[str, Any]:
    if kind is Kind.CHAT:
        return {"messages": read_messages(data.get("messages"))}
    prompt = read_prompt(data.get("prompt"))
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _read_sampling(kind: Kind, data: dict[str, Any], request_id: str) -> SamplingParams:
    values = {
        name: check(name, data[name])
        for name, check in _SAMPLING.items()
        if data.get(name) is not None
    }
    values["max_tokens"] = _read_max_tokens(kind, data)
    values["logprobs"] = _read_logprobs(kind, data)
    values.setdefault("seed", _draw_seed(request_id))
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        raise InvalidRequest(error.message, param=error.name) from error


def _read_n(data: dict[str, Any]) -> int:
    n = _optional(data, "n", partial(_check_within, low=1, high=MAX_CHOICES)) or 1
    if n > 1 and data.get("best_of") is not None:
        raise unsupported("best_of", data["best_of"])
    return n


def _read_logprobs(kind: Kind, data: dict[str, Any]) -> int | None:
    """How many of the best tokens to show beside each, or None for no log-probabilities at all."""
    if kind is Kind.COMPLETION:
        given: int | None = _optional(
            data, "logprobs", partial(_check_within, low=0, high=COMPLETION_MAX_LOGPROBS)
        )
        return given
    best = _optional(data, "top_logprobs", partial(_check_within, low=0, high=MAX_LOGPROBS)) or 0
    if _optional(data, "logprobs", check_flag):
        return best
    if best:
        raise InvalidRequest(
            "top_logprobs is only allowed with logprobs=true.", param="top_logprobs"
        )
    return None


def _draw_seed(request_id: str) -> int:
    """A seed of the request's own: whoever answers it once more, for comparison, draws with the same noise."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:7], "big")


def _read_max_tokens(kind: Kind, data: dict[str, Any]) -> int | None:
    given = {
        name: _check_within(name, data[name], low=1, high=2**31 - 1)
        for name in ("max_tokens", "max_completion_tokens")
        if data.get(name) is not None
    }
    if len(set(given.values())) > 1:
        raise InvalidRequest(
            "max_completion_tokens and max_tokens differ; send one of them.",
            param="max_completion_tokens",
        )
    default = COMPLETION_MAX_TOKENS if kind is Kind.COMPLETION else None
    return next(iter(given.values()), default)


def _read_stream_options(data: dict[str, Any], *, stream: bool) -> bool:
    if data.get("stream_options") is None:
        return False
    if not stream:
        raise InvalidRequest(
            "stream_options is only allowed with stream=true.", param="stream_options"
        )
    options = check_object("stream_options", data["stream_options"], longest=8)
    refuse_unknown("stream_options", options, ("include_usage", "include_obfuscation"))
    if options.get("include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation", options["include_obfuscation"])
    usage = options.get("include_usage")
    return usage is not None and check_flag("stream_options.include_usage", usage)


def _optional(data: dict[str, Any], name: str, check: Callable[[str, Any], Any]) -> Any:
    return None if data.get(name) is None else check(name, data[name])


def _check_within(name: str, value: Any, *, low: int, high: int) -> int:
    number = check_integer(name, value)
    if not low <= number <= high:
        raise InvalidRequest(
            f"{name}={number} is out of range; it must be at least {low} and at most {high}.",
            param=name,
        )
    return number


def _check_user(name: str, value: Any) -> str:
    return check_label(name, value, longest=MAX_USER_LENGTH)


def _check_metadata(name: str, value: Any) -> dict[str, str]:
    pairs = check_object(name, value, longest=MAX_METADATA_PAIRS)
    for key, text in pairs.items():
        check_label(name, key, longest=MAX_METADATA_KEY_LENGTH)
        check_label(f"{name}.{key}", text, longest=MAX_METADATA_VALUE_LENGTH)
    return pairs


def _check_stop(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (check_text(name, value),)
    if value == []:
        return ()
    strings = check_list(name, value, longest=MAX_STOP_STRINGS)
    return tuple(check_text(name, text) for text in strings)


def _check_logit_bias(name: str, value: Any) -> dict[int, float]:
    biases = check_object(name, value, longest=MAX_LOGIT_BIAS)
    return {check_token_id(name, key): check_number(name, bias) for key, bias in biases.items()}


def _only(*accepted: Any) -> Callable[[Any], bool]:
    """Whether a value is one of those that change nothing; true is not 1, and 1.0 is not 1."""
    return lambda value: any(type(value) is type(one) and value == one for one in accepted)


def _is_hint(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_USER_LENGTH


_SAMPLING: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": check_number,
    "top_p": check_number,
    "top_k": check_integer,
    "min_p": check_number,
    "seed": check_integer,
    "stop": _check_stop,
    "presence_penalty": check_number,
    "frequency_penalty": check_number,
    "repetition_penalty": check_number,
    "logit_bias": _check_logit_bias,
}

_COMMON = {
    "model",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "logprobs",
    *_SAMPLING,
}

# What OpenAI knows and we do not do, with the values under which nothing would be different.
_NEUTRAL: Mapping[Kind, Mapping[str, Callable[[Any], bool]]] = {
    Kind.CHAT: {
        "tools": _only([]),
        "tool_choice": _only("none"),
        "parallel_tool_calls": _only(True, False),
        "functions": _only([]),
        "function_call": _only("none"),
        "response_format": _only({"type": "text"}),
        "modalities": _only(["text"]),
        "audio": _only(),
        "prediction": _only(),
        "web_search_options": _only(),
        "moderation": _only(),
        "reasoning_effort": _only("none"),
        "verbosity": _only("medium"),
        "store": _only(False),
        "service_tier": _only("auto", "default"),
        "safety_identifier": _is_hint,
        "prompt_cache_key": _is_hint,
        "prompt_cache_options": _only(),
        "prompt_cache_retention": _only("in_memory"),
    },
    Kind.COMPLETION: {
        "best_of": _only(1),
        "echo": _only(False),
        "suffix": _only(""),
    },
}

_KNOWN: Mapping[Kind, frozenset[str]] = {
    Kind.CHAT: frozenset({"messages", "top_logprobs", *_COMMON, *_NEUTRAL[Kind.CHAT]}),
    Kind.COMPLETION: frozenset({"prompt", *_COMMON, *_NEUTRAL[Kind.COMPLETION]}),
}
