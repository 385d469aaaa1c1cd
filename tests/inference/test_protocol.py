"""Every message survives the way through JSON, and a parameter out of range is named."""

from __future__ import annotations

import json
from dataclasses import replace

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
    Route,
    SamplingParams,
    StepFrame,
    TokenRow,
)

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
)
finished = st.builds(
    Finished,
    reason=st.sampled_from(FinishReason),
    prompt_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
    queue_s=st.floats(0, 1e3),
    first_token_s=st.floats(0, 1e3),
    total_s=st.floats(0, 1e3),
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


@given(rows=st.lists(rows, max_size=5).map(tuple))
def test_a_frame_survives_json(rows: tuple[TokenRow, ...]) -> None:
    frame = StepFrame("slot-1", "m/1", "abc", rows)

    assert StepFrame.from_json(frame.to_json()) == frame


def test_a_row_in_the_middle_of_an_answer_is_four_values() -> None:
    frame = StepFrame("s", "m/1", "f", (TokenRow("r1", 1, 0, "hi"),))

    assert json.loads(frame.to_json()) == ["s", "m/1", "f", [["r1", 1, 0, "hi"]]]


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
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as refused:
        replace(SamplingParams(), **{name: value})  # type: ignore[arg-type]

    assert refused.value.name == name
    assert name.split("_")[0] in refused.value.message
