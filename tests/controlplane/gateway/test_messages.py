"""Messages and prompts: what is accepted, what it becomes, and by which path it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.gateway.body import InvalidRequest
from controlplane.gateway.messages import read_messages, read_prompt


def refusal_of_messages(value: Any) -> InvalidRequest:
    """Why messages are refused."""
    with pytest.raises(InvalidRequest) as refused:
        read_messages(value)
    return refused.value


def test_messages_become_roles_and_text() -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    turns = read_messages(
        [
            {"role": "system", "content": "S"},
            {"role": "developer", "content": "D"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": "A", "refusal": None, "tool_calls": [], "audio": None},
        ]
    )

    assert [(turn.role, turn.content, turn.name) for turn in turns] == [
        ("system", "S", None),
        ("system", "D", None),
        ("user", "One\ntwo", "ann"),
        ("assistant", "A", None),
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "tool", "content": "x", "tool_call_id": "t"}, "messages[0].role"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]},
            "messages[0].content[0].more",
        ),
        ({"role": "user", "content": "x", "name": "a b"}, "messages[0].name"),
        ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
        ({"role": "user", "content": "x", "more": 1}, "messages[0].more"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
)
def test_a_message_is_refused_by_its_path(message: Any, param: str) -> None:
    assert refusal_of_messages([message]).param == param


@pytest.mark.parametrize("messages", [[], {}, "x", [{"role": "user", "content": "Hi"}] * 257])
def test_a_list_of_messages_has_bounds(messages: Any) -> None:
    assert refusal_of_messages(messages).param == "messages"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, expected: str | tuple[int, ...]) -> None:
    assert read_prompt(prompt) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [""],
        ["a", "b"],
        [[1], [2]],
        [[]],
        [1, "a"],
        [1, True],
        [1.0],
        [-1],
        [2**31],
        1,
        {},
        [{}],
        ["\ud800"],
        [None],
        [["a"]],
    ],
)
def test_no_or_several_or_malformed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_prompt(prompt)

    assert refused.value.param == "prompt"
