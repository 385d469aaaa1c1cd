"""Messages and prompts of a body, in the plain form that engines take: text per turn, or token ids.

A role, part or field that we could only drop is refused by its path, such as ``messages[3].content[1].type``.
"""

from __future__ import annotations

import re
from typing import Any

from controlplane.gateway.body import (
    InvalidRequest,
    check_label,
    check_list,
    check_object,
    check_text,
    missing,
    refuse_unknown,
    show,
    unsupported,
    wrong_type,
)
from inference.protocol import ChatMessage

MAX_MESSAGES = 256
MAX_PARTS = 256
MAX_PROMPT_TOKENS = 2**19
MAX_NAME_LENGTH = 64
MAX_TOKEN_ID = 2**31 - 1

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that are accepted, and how chat templates name them."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_messages(value: Any) -> tuple[ChatMessage, ...]:
    """The conversation, at most ``MAX_MESSAGES`` turns, each with its content as one string.

    Raises:
        InvalidRequest: a turn is malformed, or holds something that is not text.
    """
    if value is None:
        raise missing("messages")
    messages = check_list("messages", value, longest=MAX_MESSAGES)
    return tuple(
        _read_message(f"messages[{index}]", message) for index, message in enumerate(messages)
    )


def _read_message(name: str, value: Any) -> ChatMessage:
    message = check_object(name, value, longest=16)
    role = message.get("role")
    if role is None:
        raise missing(f"{name}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"{name}.role={show(role)} is not supported; use {', '.join(ROLES)}.",
            param=f"{name}.role",
            code="unsupported_value",
        )
    # An assistant's turn comes back as we sent it, with the empty fields of OpenAI's message object.
    for empty in ("tool_calls", "annotations"):
        if message.get(empty):
            raise unsupported(f"{name}.{empty}", message[empty])
    refuse_unknown(name, message, ("role", "content", "name", "tool_calls", "annotations"))
    content = _read_content(f"{name}.content", message.get("content"))
    return ChatMessage(ROLES[role], content, _read_author(f"{name}.name", message.get("name")))


def _read_author(name: str, value: Any) -> str | None:
    if value is None:
        return None
    author = check_label(name, value, longest=MAX_NAME_LENGTH)
    if not _NAME.fullmatch(author):
        raise InvalidRequest(f"{name} may hold letters, digits, '_', '-' and '.' only.", param=name)
    return author


def _read_content(name: str, value: Any) -> str:
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return check_text(name, value)
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string or a list of text parts")
    parts = check_list(name, value, longest=MAX_PARTS)
    # The peers join text parts by a line break where a chat template takes one string (vLLM's chat_utils.py).
    return "\n".join(_read_part(f"{name}[{index}]", part) for index, part in enumerate(parts))


def _read_part(name: str, value: Any) -> str:
    part = check_object(name, value, longest=8)
    kind = part.get("type")
    if kind != "text":
        raise unsupported(f"{name}.type", kind)
    refuse_unknown(name, part, ("type", "text"))
    if part.get("text") is None:
        raise missing(f"{name}.text")
    return check_text(f"{name}.text", part["text"])


def read_prompt(value: Any) -> str | tuple[int, ...]:
    """One prompt: text, or token ids; either may stand in a list of its own.

    Raises:
        InvalidRequest: no prompt, several prompts, or neither text nor token ids.
    """
    if value is None:
        raise missing("prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidRequest(
                f"prompt has {len(value)} prompts; send one per request.",
                param="prompt",
                code="unsupported_value",
            )
        value = value[0]
    if isinstance(value, list):
        return _read_token_ids(value)
    text = check_text("prompt", value)
    if not text:
        raise InvalidRequest("prompt is empty; send at least one character.", param="prompt")
    return text


def _read_token_ids(value: list[Any]) -> tuple[int, ...]:
    ids = check_list("prompt", value, longest=MAX_PROMPT_TOKENS)
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise InvalidRequest(
            "prompt as a list must hold token ids, which are whole numbers from 0.", param="prompt"
        )
    return tuple(ids)
