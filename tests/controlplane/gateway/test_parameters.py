"""Each parameter: what is accepted, what it becomes, and by which name it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.body import InvalidRequest
from controlplane.gateway.parameters import Call, Kind, Origin, parse, sticky_key

ORIGIN = Origin(request_id="r1", key_id="k1", deadline_s=60.0)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Once"}
BASES = {Kind.CHAT: CHAT, Kind.COMPLETION: COMPLETION}


def parse_with(kind: Kind, **changes: Any) -> Call:
    """A good body with some members changed."""
    return parse(kind, json.dumps({**BASES[kind], **changes}).encode(), ORIGIN)


def chat(**changes: Any) -> Call:
    """A good chat body with some members changed."""
    return parse_with(Kind.CHAT, **changes)


def completion(**changes: Any) -> Call:
    """A good completion body with some members changed."""
    return parse_with(Kind.COMPLETION, **changes)


def refusal(kind: Kind, **changes: Any) -> InvalidRequest:
    """Why a changed body is refused."""
    with pytest.raises(InvalidRequest) as refused:
        parse_with(kind, **changes)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 5, 5),
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("top_p", 0.5, 0.5),
        ("top_k", 40, 40),
        ("min_p", 0.1, 0.1),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("stop", "x", ("x",)),
        ("stop", ["a", "b", "c", "d"], ("a", "b", "c", "d")),
        ("stop", [], ()),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", 1.2, 1.2),
        ("logit_bias", {"0": -100, "50256": 1.5}, {0: -100.0, 50256: 1.5}),
    ],
)
@pytest.mark.parametrize("kind", Kind)
def test_a_sampling_parameter_reaches_the_engine(
    kind: Kind, name: str, value: Any, expected: Any
) -> None:
    sampling = parse_with(kind, **{name: value}).request.sampling

    assert getattr(sampling, name) == expected
    assert type(getattr(sampling, name)) is type(expected)


@pytest.mark.parametrize("kind", Kind)
def test_what_the_body_leaves_out_is_left_to_the_version(kind: Kind) -> None:
    everything = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

    assert parse_with(kind).request.unset == everything
    assert parse_with(kind, **dict.fromkeys(everything)).request.unset == everything


@pytest.mark.parametrize("kind", Kind)
def test_a_value_that_the_body_gives_is_not_left_to_the_version(kind: Kind) -> None:
    request = parse_with(kind, temperature=1, top_k=0, min_p=None).request

    assert request.unset == ("top_p", "min_p", "repetition_penalty")


HUGE = 10**39
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
WHOLE = ("max_tokens", "max_completion_tokens", "top_k", "seed")


@pytest.mark.parametrize("name", [*NUMBERS, "repetition_penalty"])
@pytest.mark.parametrize("value", [True, "1", [], {}, -3, 11, HUGE, -HUGE])
def test_a_number_that_is_none_or_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(Kind.CHAT, **{name: value}).param == name


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [True, False, "1", 1.0, 1.5, [], {}, HUGE, -HUGE, 2**63])
def test_a_whole_number_that_is_none_or_too_large_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(Kind.CHAT, **{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("top_k", -1),
        ("top_p", 0),
        ("repetition_penalty", 0),
        ("stop", ["a"] * 5),
        ("stop", ""),
        ("stop", "x" * 65),
        ("stop", [1]),
        ("stop", [None]),
        ("stop", {"a": 1}),
        ("stop", "\ud800"),
        ("logit_bias", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(index): 1 for index in range(301)}),
        ("n", 0),
        ("n", 9),
        ("n", True),
        ("n", 1.0),
        ("n", "1"),
        ("logprobs", "yes"),
        ("logprobs", -1),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("user", 1),
        ("user", "u" * 513),
        ("user", "a\x00b"),
        ("user", "\udfff"),
        ("metadata", {str(index): "x" for index in range(17)}),
        ("metadata", {"k" * 65: "x"}),
        ("metadata", ["x"]),
        ("model", 1),
        ("model", "m" * 257),
        ("model", "\ud800"),
    ],
)
@pytest.mark.parametrize("kind", Kind)
def test_a_value_that_cannot_be_meant_is_refused_by_name(kind: Kind, name: str, value: Any) -> None:
    assert refusal(kind, **{name: value}).param == name


@pytest.mark.parametrize("name", [*NUMBERS, *WHOLE, "repetition_penalty", "n", "logit_bias"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000])
def test_a_number_beyond_all_use_is_refused_by_name(name: str, text: str) -> None:
    value = f'{{"1": {text}}}' if name == "logit_bias" else text
    body = f'{json.dumps(CHAT)[:-1]}, "{name}": {value}}}'
    with pytest.raises(InvalidRequest) as refused:
        parse(Kind.CHAT, body.encode(), ORIGIN)

    assert refused.value.param == name


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"k": 1}, "metadata.k"),
        ({"k": None}, "metadata.k"),
        ({"k": "v" * 513}, "metadata.k"),
        ({"k": "\ud800"}, "metadata.k"),
        ({"k": {"deep": "x"}}, "metadata.k"),
    ],
)
def test_a_metadata_value_is_refused_by_its_path(value: dict[str, Any], param: str) -> None:
    assert refusal(Kind.CHAT, metadata=value).param == param


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *[(Kind.CHAT, name, value) for name, value in (
            ("n", 1), ("logprobs", False), ("top_logprobs", 0), ("tools", []), ("tool_choice", "none"),
            ("parallel_tool_calls", True), ("parallel_tool_calls", False), ("functions", []),
            ("function_call", "none"), ("response_format", {"type": "text"}), ("modalities", ["text"]),
            ("store", False), ("service_tier", "auto"), ("reasoning_effort", "none"),
            ("verbosity", "medium"), ("safety_identifier", "s"), ("prompt_cache_key", "p"),
            ("audio", None), ("prediction", None),
        )],
        *[(Kind.COMPLETION, name, value) for name, value in (
            ("n", 1), ("best_of", 1), ("echo", False), ("suffix", ""), ("logprobs", None),
        )],
    ],
)  # fmt: skip
def test_a_value_that_changes_nothing_is_accepted(kind: Kind, name: str, value: Any) -> None:
    assert parse_with(kind, **{name: value}) == parse_with(kind)


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *[(Kind.CHAT, name, value) for name, value in (
            ("tools", [TOOL]), ("tool_choice", "auto"), ("tool_choice", TOOL),
            ("parallel_tool_calls", 1), ("functions", [{}]), ("function_call", {"name": "f"}),
            ("response_format", {"type": "json_object"}), ("response_format", "text"),
            ("modalities", ["text", "audio"]), ("audio", {}), ("prediction", {}), ("store", True),
            ("web_search_options", {}), ("moderation", {}), ("reasoning_effort", "high"),
            ("verbosity", "low"), ("service_tier", "priority"), ("safety_identifier", 1),
            ("prompt_cache_options", {}), ("prompt_cache_retention", "24h"),
        )],
        *[(Kind.COMPLETION, name, value) for name, value in (
            ("best_of", 2), ("echo", True), ("suffix", "end"),
        )],
    ],
)  # fmt: skip
def test_what_we_cannot_do_is_refused_by_name(kind: Kind, name: str, value: Any) -> None:
    refused = refusal(kind, **{name: value})

    assert (refused.param, refused.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", ["temprature", "ignore_eos", "use_beam_search", "", "é", "\ud800"])
def test_an_unknown_parameter_is_refused_by_name(kind: Kind, name: str) -> None:
    refused = refusal(kind, **{name: 1})

    assert (refused.param, refused.code) == (name, "unknown_parameter")


def test_each_door_refuses_the_others_input() -> None:
    assert refusal(Kind.CHAT, prompt="x").param == "prompt"
    assert refusal(Kind.COMPLETION, messages=CHAT["messages"]).param == "messages"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.CHAT, "model"),
        (Kind.CHAT, "messages"),
        (Kind.COMPLETION, "model"),
        (Kind.COMPLETION, "prompt"),
    ],
)
def test_a_missing_or_null_required_parameter_is_named(kind: Kind, name: str) -> None:
    body = {key: value for key, value in BASES[kind].items() if key != name}
    for missing in (body, {**body, name: None}):
        with pytest.raises(InvalidRequest) as refused:
            parse(kind, json.dumps(missing).encode(), ORIGIN)
        assert (refused.value.param, refused.value.code) == (name, "missing_required_parameter")


def test_null_is_the_same_as_absent() -> None:
    names = ["temperature", "max_tokens", "stop", "n", "tools", "user", "metadata", "stream"]

    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ({"max_tokens": 4}, 4),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 4, "max_completion_tokens": 4}, 4),
        ({}, None),
    ],
)
def test_either_name_limits_the_length(given_values: dict[str, int], expected: int | None) -> None:
    assert chat(**given_values).request.sampling.max_tokens == expected


def test_two_lengths_that_differ_are_refused() -> None:
    assert (
        refusal(Kind.CHAT, max_tokens=4, max_completion_tokens=5).param == "max_completion_tokens"
    )


def test_a_completion_without_a_length_has_openais() -> None:
    assert completion().request.sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("options", "include_usage"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        ({"include_usage": None, "include_obfuscation": False}, False),
    ],
)
def test_stream_options_say_whether_usage_is_sent(options: Any, include_usage: bool) -> None:
    call = chat(stream=True, stream_options=options)

    assert (call.stream, call.include_usage) == (True, include_usage)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ([], "stream_options"),
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"more": 1}, "stream_options.more"),
    ],
)
def test_stream_options_are_refused_by_path(options: Any, param: str) -> None:
    assert refusal(Kind.CHAT, stream=True, stream_options=options).param == param


@pytest.mark.parametrize("depth", [33, 5000, 100_000])
def test_a_deeply_nested_value_is_refused(depth: int) -> None:
    body = json.dumps(CHAT)[:-1] + ', "metadata": ' + '{"a":' * depth + "1" + "}" * depth + "}"
    with pytest.raises(InvalidRequest):
        parse(Kind.CHAT, body.encode(), ORIGIN)


def test_messages_of_errors_stay_short() -> None:
    long = "x" * 100_000

    assert len(refusal(Kind.CHAT, temperature=long).message) < 300
    assert len(refusal(Kind.CHAT, **{long: 1}).message) < 300
    assert len(refusal(Kind.CHAT, messages=[{"role": long, "content": ""}]).message) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
KNOWN = st.sampled_from(
    [
        *NUMBERS,
        *WHOLE,
        *("stop", "logit_bias", "stream", "stream_options", "user", "metadata", "model"),
        *("messages", "prompt", "n", "tools", "response_format", "suffix"),
    ]
)


@given(st.sampled_from(Kind), st.dictionaries(KNOWN | st.text(max_size=5), JSON, max_size=4))
def test_every_json_body_is_a_request_that_survives_json_or_a_refusal(
    kind: Kind, changes: dict[str, Any]
) -> None:
    try:
        call = parse_with(kind, **changes)
    except InvalidRequest:
        return
    assert type(call.request).from_json(call.request.to_json()) == call.request


@given(st.binary(max_size=200))
def test_every_other_body_is_a_refusal(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(Kind.CHAT, body, ORIGIN)


def test_one_conversation_keeps_its_sticky_key_and_others_have_their_own() -> None:
    first = {"role": "user", "content": "Hi"}
    turns = [first, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "More"}]
    key = sticky_key(chat(messages=[first]).request)

    assert sticky_key(chat(messages=turns).request) == key
    assert sticky_key(chat(messages=turns[2:]).request) != key
    assert sticky_key(completion(prompt="Hi").request) != key


def test_a_user_keeps_one_sticky_key_over_all_conversations_of_one_key() -> None:
    keys = {sticky_key(chat(user="u").request), sticky_key(completion(user="u").request)}
    other = Origin(request_id="r1", key_id="k2", deadline_s=60.0)
    elsewhere = parse(Kind.CHAT, json.dumps({**CHAT, "user": "u"}).encode(), other)

    assert len(keys) == 1
    assert sticky_key(elsewhere.request) not in keys
