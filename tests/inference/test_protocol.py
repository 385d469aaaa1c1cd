"""Every message survives the way through JSON, and a parameter out of range is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.protocol import (
    ChatMessage,
    Failure,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidParameter,
    QueueEntry,
    RequestRecord,
    Resident,
    Route,
    SamplingParams,
    Score,
    StepFrame,
    TokenLogprob,
    TokenRow,
)
from inference.protocol.text import known_fields

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), max_size=4
    ).map(tuple),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=5),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
finished = st.builds(
    Finished,
    reason=st.sampled_from(FinishReason),
    prompt_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
    queue_s=st.floats(0, 1e3),
    first_token_s=st.floats(0, 1e3),
    total_s=st.floats(0, 1e3),
    engine_s=st.floats(0, 1e3),
    cached_tokens=st.integers(0, 10**6),
    score=st.none()
    | st.builds(
        Score,
        logprobs=st.lists(st.floats(-1e3, 0), max_size=4).map(tuple),
        num_agreed=st.integers(0, 4),
    ),
)
# Any bytes, also those that are no whole character.
tokens = st.binary(max_size=6).map(TokenLogprob.to_token)
token_logprobs = st.builds(
    TokenLogprob,
    token=tokens,
    logprob=st.floats(-1e3, 0),
    top=st.lists(st.tuples(tokens, st.floats(-1e3, 0)), max_size=3).map(tuple),
)
failures = st.builds(
    Failure,
    code=texts,
    message=texts,
    status=st.integers(400, 599),
    param=st.none() | texts,
    retry_after_s=st.none() | st.integers(1, 60),
)
rows = st.builds(
    TokenRow,
    request_id=texts,
    attempt=st.integers(1, 9),
    seq=st.integers(0, 10**6),
    text=texts,
    finish=st.none() | finished,
    failure=st.none() | failures,
    choice=st.integers(0, 7),
    logprob=st.none() | token_logprobs,
)


@given(
    sampling=sampling_params,
    messages=st.lists(st.builds(ChatMessage, role=texts, content=texts, name=st.none() | texts)),
    metadata=st.dictionaries(texts, texts, max_size=3),
)
def test_a_chat_request_survives_json(
    sampling: SamplingParams, messages: list[ChatMessage], metadata: dict[str, str]
) -> None:
    request = GenerateRequest(
        id="r1",
        endpoint="smollm2",
        sampling=sampling,
        deadline_s=30.0,
        messages=tuple(messages),
        key_id="k1",
        user="u1",
        metadata=metadata,
        unset=("temperature", "top_k"),
        n=3,
        cache_salt="k1",
        score_text="So be it.",
    )

    assert GenerateRequest.from_json(request.to_json()) == request


@given(token_ids=st.lists(st.integers(0, 2**31), min_size=1).map(tuple))
def test_a_request_of_token_ids_survives_json(token_ids: tuple[int, ...]) -> None:
    request = GenerateRequest(
        id="r1",
        endpoint="e",
        sampling=SamplingParams(),
        deadline_s=1.0,
        prompt_token_ids=token_ids,
    )

    assert GenerateRequest.from_json(request.to_json()) == request


def test_a_body_of_an_older_gateway_leaves_nothing_to_the_version() -> None:
    request = GenerateRequest("r1", "e", SamplingParams(), 1.0, prompt="Hello")
    body = json.loads(request.to_json())
    del body["unset"]

    assert GenerateRequest.from_json(json.dumps(body)) == request


def test_what_a_slot_of_the_last_release_does_not_know_is_sent_only_where_it_is_used() -> None:
    plain = json.loads(GenerateRequest("r1", "e", SamplingParams(), 1.0, prompt="Hi").to_json())
    sampling = SamplingParams(logprobs=0)
    used = GenerateRequest("r1", "e", sampling, 1.0, prompt="Hi", n=2, cache_salt="k")
    body = json.loads(used.to_json())

    assert not {"n", "cache_salt", "score_text"} & plain.keys()
    assert "logprobs" not in plain["sampling"]
    assert (body["n"], body["cache_salt"], body["sampling"]["logprobs"]) == (2, "k", 0)


@pytest.mark.parametrize("n", [0, 9])
def test_a_number_of_choices_out_of_range_is_named(n: int) -> None:
    with pytest.raises(InvalidParameter) as refused:
        GenerateRequest("r1", "e", SamplingParams(), 1.0, prompt="Hi", n=n)

    assert refused.value.name == "n"


@given(rows=st.lists(rows, max_size=5).map(tuple))
def test_a_frame_survives_json(rows: tuple[TokenRow, ...]) -> None:
    frame = StepFrame("slot-1", "m/1", "abc", rows)

    assert StepFrame.from_json(frame.to_json()) == frame


def test_a_row_in_the_middle_of_an_answer_is_four_values() -> None:
    frame = StepFrame("s", "m/1", "f", (TokenRow("r1", 1, 0, "hi"),))

    assert json.loads(frame.to_json()) == ["s", "m/1", "f", [["r1", 1, 0, "hi"]]]


def test_the_last_row_of_a_plain_answer_is_six_values_as_ever() -> None:
    finish = Finished(FinishReason.STOP, 3, 1, 0.1, 0.2, 0.3)
    frame = StepFrame("s", "m/1", "f", (TokenRow("r1", 1, 0, "hi", finish),))

    (row,) = json.loads(frame.to_json())[3]
    assert row[4:] == [
        {
            "reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": 1,
            "queue_s": 0.1,
            "first_token_s": 0.2,
            "total_s": 0.3,
        },
        None,
    ]


def test_rows_of_an_older_slot_are_of_the_first_choice() -> None:
    finish = Finished(FinishReason.STOP, 3, 1, 0.1, 0.2, 0.3)
    end = {
        "reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "queue_s": 0.1,
        "first_token_s": 0.2,
        "total_s": 0.3,
    }
    old = ["s", "m/1", "f", [["r1", 1, 0, "hi"], ["r1", 1, 1, "", end, None], ["r1", 2, -1, ""]]]

    assert StepFrame.from_json(json.dumps(old)).rows == (
        TokenRow("r1", 1, 0, "hi"),
        TokenRow("r1", 1, 1, "", finish),
        TokenRow("r1", 2, -1, ""),
    )


def test_half_a_character_goes_as_numbers_and_whole_ones_as_text() -> None:
    logprob = TokenLogprob(TokenLogprob.to_token(b"\xf0\x9f"), -0.5, (("ok", -1.5),))
    frame = StepFrame("s", "m/1", "f", (TokenRow("r1", 1, 0, "", logprob=logprob),))

    text = frame.to_json()
    assert text.encode()  # what a stream field must be
    (row,) = json.loads(text)[3]
    assert row == ["r1", 1, 0, "", None, None, 0, [[240, 159], -0.5, [["ok", -1.5]]]]


@pytest.mark.parametrize(
    ("message", "values"),
    [
        (Route, {"endpoint": "chat", "incarnation": "i", "generation": 1, "live": "m/1"}),
        (Failure, {"code": "c", "message": "m", "status": 400}),
        (Resident, {"endpoint": "chat", "version": "m/1", "artifact": "a"}),
    ],
)
def test_what_a_later_release_says_beside_is_passed_over(
    message: type[Any], values: dict[str, Any]
) -> None:
    assert message(**known_fields(message, values | {"of_tomorrow": [1]})) == message(**values)


def test_the_end_of_a_later_slots_answer_is_read() -> None:
    finish = Finished(FinishReason.STOP, 3, 5, 0.1, 0.2, 0.3)
    frame = StepFrame("s", "m/1", "f", (TokenRow("r", 1, 4, "", finish),))
    text = frame.to_json().replace('"prompt_tokens"', '"of_tomorrow":1,"prompt_tokens"')

    assert StepFrame.from_json(text) == frame


def test_a_queue_entry_survives_stream_fields() -> None:
    entry = QueueEntry("r1", "gw", 10, 20, 3, "live")

    assert QueueEntry.from_fields(entry.to_fields()) == entry


def test_a_route_survives_json() -> None:
    route = Route("e", "i", 7, "m/2", previous="m/1", candidate="m/3", canary_bp=100, salt="s")

    assert Route.from_json(route.to_json()) == route


def test_a_request_record_survives_json() -> None:
    record = RequestRecord(
        id="r1",
        key_id="k1",
        endpoint="e",
        version="m/1",
        generation=1,
        arm="live",
        outcome="ok",
        status=200,
        finish_reason="stop",
        streamed=True,
        prompt_tokens=3,
        completion_tokens=5,
        queue_s=0.1,
        first_token_s=0.2,
        total_s=0.3,
        finished_at=1.0,
        tags={"topic": "refund"},
    )

    assert RequestRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("stop", ("a", "b", "c", "d", "e")),
        ("stop", ("",)),
        ("stop", ("x" * 65,)),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(301), 1.0)),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as refused:
        replace(SamplingParams(), **{name: value})  # type: ignore[arg-type]

    assert refused.value.name == name
    assert name.split("_")[0] in refused.value.message
