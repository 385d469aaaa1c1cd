"""The OpenAI package, unmodified, against a gateway that listens on a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from inference.client import NoReadySlot, QueueFull, QueueUnavailable
from inference.protocol import Failure, FinishReason
from tests.controlplane.gateway.conftest import Served
from tests.controlplane.gateway.fakes import (
    ENDPOINT,
    KEY,
    REVOKED_KEY,
    SCOPED_KEY,
    VERSION,
    failure_row,
    last_row,
    text_row,
)

MESSAGES: Any = [{"role": "user", "content": "Say hello."}]


def sdk(gateway: Served, *, key: str = KEY, max_retries: int = 0) -> OpenAI:
    """The package as an application sets it up."""
    return OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=max_retries, timeout=10.0)


def test_a_chat_completion_has_text_reason_and_the_engines_usage(gateway: Served) -> None:
    with sdk(gateway) as client:
        answer = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)

    assert answer.object == "chat.completion"
    assert answer.id == f"chatcmpl-{gateway.fake.requests[0].id}"
    assert answer.model == ENDPOINT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
    }


def test_a_stream_has_one_role_one_reason_and_null_reasons_before_it(gateway: Served) -> None:
    with (
        sdk(gateway) as client,
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, stream=True) as stream,
    ):
        chunks = list(stream)

    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{gateway.fake.requests[0].id}"}
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello!"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    assert all("finish_reason" in chunk.choices[0].model_fields_set for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_that_asks_for_usage_ends_with_it_and_without_choices(gateway: Served) -> None:
    with (
        sdk(gateway) as client,
        client.chat.completions.create(
            model=ENDPOINT,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        *chunks, last = list(stream)

    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (7, 3)


def test_an_answer_of_one_row_streams_whole(gateway: Served) -> None:
    gateway.fake.script = [[last_row(0, "Hi", reason=FinishReason.LENGTH, completion_tokens=1)]]
    with (
        sdk(gateway) as client,
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, stream=True) as stream,
    ):
        chunks = list(stream)

    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hi", None]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_text_with_line_separators_survives_every_way_to_split_lines(gateway: Served) -> None:
    text = "a\u2028b\u0085c\r\nd\u20ac\U0001f600"
    gateway.fake.script = [[text_row(0, text)], [last_row(1)]]
    with (
        sdk(gateway) as client,
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, stream=True) as stream,
    ):
        seen = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert seen == text


def test_completions_answer_with_and_without_a_stream(gateway: Served) -> None:
    with sdk(gateway) as client:
        whole = client.completions.create(model=ENDPOINT, prompt="Once")
        with client.completions.create(model=ENDPOINT, prompt=["Once"], stream=True) as stream:
            chunks = list(stream)

    assert (whole.object, whole.choices[0].text) == ("text_completion", "Hello!")
    assert whole.id.startswith("cmpl-")
    assert whole.usage is not None
    assert whole.usage.total_tokens == 10
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello!"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.object == "text_completion" for chunk in chunks)


def test_a_prompt_of_token_ids_reaches_the_engine_as_such(gateway: Served) -> None:
    with sdk(gateway) as client:
        client.completions.create(model=ENDPOINT, prompt=[1, 2, 3])

    request = gateway.fake.requests[0]
    assert (request.prompt, request.prompt_token_ids) == (None, (1, 2, 3))


def test_every_supported_parameter_reaches_the_engine(gateway: Served) -> None:
    with sdk(gateway) as client:
        client.chat.completions.create(
            model=ENDPOINT,
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
                {"role": "assistant", "content": "Hello!"},
                {"role": "user", "content": "Again"},
            ],
            max_completion_tokens=5,
            temperature=0,
            top_p=0.9,
            seed=3,
            stop=["x", "yy"],
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"12": 5},
            user="u-1",
            metadata={"team": "search"},
            n=1,
            logprobs=False,
            response_format={"type": "text"},
            extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1},
        )

    request = gateway.fake.requests[0]
    assert [(turn.role, turn.content, turn.name) for turn in request.messages or ()] == [
        ("system", "Be brief.", None),
        ("user", "Hi", "ann"),
        ("assistant", "Hello!", None),
        ("user", "Again", None),
    ]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.0, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (20, 0.05, 3)
    assert (sampling.stop, dict(sampling.logit_bias)) == (("x", "yy"), {12: 5.0})
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.1
    assert (request.user, dict(request.metadata)) == ("u-1", {"team": "search"})
    assert (request.key_id, request.deadline_s) == ("tests1", 30.0)


def test_an_answer_can_be_sent_back_as_history(gateway: Served) -> None:
    with sdk(gateway) as client:
        first = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)
        history: Any = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "More"}]
        client.chat.completions.create(model=ENDPOINT, messages=history)

    turns = gateway.fake.requests[1].messages or ()
    assert [turn.content for turn in turns] == ["Say hello.", "Hello!", "More"]
    assert gateway.fake.sticky_keys[0] == gateway.fake.sticky_keys[1]


def test_the_async_package_streams_and_answers_side_by_side(gateway: Served) -> None:
    async def ask() -> tuple[str, list[str]]:
        async with AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, timeout=10.0
        ) as client:

            async def stream_one() -> str:
                stream = await client.chat.completions.create(
                    model=ENDPOINT, messages=MESSAGES, stream=True
                )
                async with stream:
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            whole = await client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)
            streamed = await asyncio.gather(*(stream_one() for _ in range(8)))
            return whole.choices[0].message.content or "", list(streamed)

    whole, streamed = asyncio.run(ask())
    assert whole == "Hello!"
    assert streamed == ["Hello!"] * 8


def test_models_lists_and_finds_what_the_key_may_use(gateway: Served) -> None:
    with sdk(gateway) as client, sdk(gateway, key=SCOPED_KEY) as scoped:
        assert [model.id for model in client.models.list()] == ["other", ENDPOINT]
        assert client.models.retrieve(ENDPOINT).object == "model"
        assert [model.id for model in scoped.models.list()] == ["other"]
        with pytest.raises(openai.NotFoundError) as unknown:
            client.models.retrieve("nobody")
        with pytest.raises(openai.PermissionDeniedError) as refused:
            scoped.models.retrieve(ENDPOINT)

    assert unknown.value.code == "model_not_found"
    assert refused.value.code == "endpoint_not_allowed"


def test_headers_tell_the_request_the_version_and_the_generation(gateway: Served) -> None:
    with sdk(gateway) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=ENDPOINT, messages=MESSAGES, extra_headers={"x-request-id": "mine"}
        )

    assert raw.request_id == gateway.fake.requests[0].id
    assert raw.headers["x-model-version"] == VERSION
    assert raw.headers["x-tatkal-generation"] == "42"


@pytest.mark.parametrize("key", [REVOKED_KEY, KEY[:-1] + "x", "sk-tatkal-nobody-" + "k" * 43, "x"])
def test_a_wrong_key_is_an_authentication_error(gateway: Served, key: str) -> None:
    with sdk(gateway, key=key) as client, pytest.raises(openai.AuthenticationError) as refused:
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)

    assert refused.value.code == "invalid_api_key"
    assert gateway.fake.requests == []


def test_an_unknown_model_is_not_found(gateway: Served) -> None:
    with sdk(gateway) as client, pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert gateway.fake.records == []


def test_a_key_opens_its_endpoints_alone_and_learns_nothing_of_others(gateway: Served) -> None:
    messages = []
    with sdk(gateway, key=SCOPED_KEY) as client:
        for name in (ENDPOINT, "nobody"):
            with pytest.raises(openai.PermissionDeniedError) as refused:
                client.chat.completions.create(model=name, messages=MESSAGES)
            assert (refused.value.code, refused.value.param) == ("endpoint_not_allowed", "model")
            assert f'"{name}"' in refused.value.message
            messages.append(refused.value.message.replace(name, "*"))

    assert messages[0] == messages[1]
    assert gateway.fake.records == []


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (QueueFull("Full.", 7), 429, "queue_full", "7"),
        (NoReadySlot("None.", 4), 503, "no_ready_slot", "4"),
        (QueueUnavailable("down"), 503, "queue_unavailable", "5"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_says_when_to_come_back_and_is_recorded(
    gateway: Served, refusal: Exception, status: int, code: str, retry_after: str, stream: bool
) -> None:
    gateway.fake.refusals = [refusal]
    with sdk(gateway) as client, pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, stream=stream)

    assert (refused.value.status_code, refused.value.code) == (status, code)
    assert refused.value.response.headers["retry-after"] == retry_after
    record = gateway.fake.wait_for_records()[0]
    assert (record.outcome, record.status, record.version) == (code, status, "")
    assert record.streamed is stream


@pytest.mark.slow
def test_the_package_retries_a_full_queue_and_gets_its_answer(gateway: Served) -> None:
    gateway.fake.refusals = [QueueFull("Full.", 1)]
    with sdk(gateway, max_retries=1) as client:
        answer = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)

    assert answer.choices[0].message.content == "Hello!"
    outcomes = [record.outcome for record in gateway.fake.wait_for_records(2)]
    assert outcomes == ["queue_full", "ok"]


FAULT = Failure("slot_lost", "The engine was lost.", 502)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_row_is_an_http_status(gateway: Served, stream: bool) -> None:
    failure = Failure("context_length_exceeded", "Too long: 9 of 8.", 400, "messages")
    gateway.fake.script = [[failure_row(0, failure)]]
    with sdk(gateway) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, stream=stream)

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert refused.value.response.headers["x-model-version"] == VERSION
    assert gateway.fake.wait_for_records()[0].outcome == "context_length_exceeded"


def test_a_failure_in_the_middle_of_a_stream_is_raised_by_the_package(gateway: Served) -> None:
    gateway.fake.script = [[text_row(0, "Hel")], [failure_row(1, FAULT)]]
    seen: list[str | None] = []
    with (
        sdk(gateway) as client,
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, stream=True) as stream,
        pytest.raises(openai.APIError) as raised,
    ):
        seen.extend(chunk.choices[0].delta.content for chunk in stream)

    assert raised.value.code == "slot_lost"
    record = gateway.fake.wait_for_records()[0]
    assert (record.outcome, record.status) == ("slot_lost", 502)


def test_a_failure_in_the_middle_of_a_whole_answer_is_an_http_status(gateway: Served) -> None:
    gateway.fake.script = [[text_row(0, "Hel")], [failure_row(1, FAULT)]]
    with sdk(gateway, max_retries=2) as client, pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)

    assert raised.value.status_code == 502
    assert len(gateway.fake.requests) == 1, "A failure that is no use retrying was retried."


def test_an_unsupported_parameter_is_named(gateway: Served) -> None:
    with sdk(gateway) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, store=True)

    assert (refused.value.param, refused.value.code) == ("store", "unsupported_parameter")
