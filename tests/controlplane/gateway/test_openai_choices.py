"""The OpenAI package, unmodified: several choices and log-probabilities, streamed and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from inference.protocol import Failure, FinishReason, TokenLogprob, TokenRow
from tests.controlplane.gateway.conftest import Served
from tests.controlplane.gateway.fakes import ENDPOINT, failure_row, last_row, text_row
from tests.controlplane.gateway.test_openai_client import MESSAGES, sdk

EMOJI = "🙂".encode()


def of_choice(row: TokenRow, choice: int) -> TokenRow:
    return replace(row, choice=choice)


def with_logprob(row: TokenRow, token: bytes | None = None, logprob: float = -0.5) -> TokenRow:
    text = row.text if token is None else TokenLogprob.to_token(token)
    return replace(row, logprob=TokenLogprob(text, logprob, ((text, logprob), (" no", -3.0))))


# Three choices, interleaved, which end at different times: choice 1 first, for another reason.
THREE: list[Any] = [
    [text_row(0, "a0"), of_choice(text_row(0, "b0"), 1)],
    [of_choice(text_row(0, "c0"), 2), text_row(1, "a1")],
    [of_choice(last_row(1, "b1", reason=FinishReason.LENGTH, completion_tokens=2), 1)],
    [last_row(2, "", completion_tokens=3), of_choice(text_row(1, "c1"), 2)],
    [of_choice(last_row(2, "c2", completion_tokens=3), 2)],
]
# Two halves of a character, a word that was held back as a stop string might begin with it, and the end of the sequence.
TOLD: list[Any] = [
    [with_logprob(text_row(0, ""), EMOJI[:2]), with_logprob(text_row(1, "🙂"), EMOJI[2:])],
    [with_logprob(text_row(2, ""), b" yes", -0.25)],
    [last_row(3, " yes", completion_tokens=4)],
]


@pytest.fixture
def client(gateway: Served) -> Any:
    with sdk(gateway) as client:
        yield client


def texts_by_index(chunks: Sequence[Any], text_of: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (text_of(choice) or "")
    return texts


def test_choices_come_in_order_each_with_its_own_reason(
    gateway: Served, client: openai.OpenAI
) -> None:
    gateway.fake.script = THREE
    answer = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, n=3)

    assert gateway.fake.requests[0].n == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["a0a1", "b0b1", "c0c1c2"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 8)
    assert answer.usage.total_tokens == 15


def test_a_stream_of_choices_has_a_role_and_a_reason_for_each(
    gateway: Served, client: openai.OpenAI
) -> None:
    gateway.fake.script = THREE
    chunks = list(
        client.chat.completions.create(
            model=ENDPOINT,
            messages=MESSAGES,
            n=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert texts_by_index(chunks, lambda choice: choice.delta.content) == {
        0: "a0a1",
        1: "b0b1",
        2: "c0c1c2",
    }
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert sorted(each.index for each in choices if each.delta.role) == [0, 1, 2]
    reasons = [(each.index, each.finish_reason) for each in choices if each.finish_reason]
    assert reasons == [(1, "length"), (0, "stop"), (2, "stop")]
    assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 8)


def test_completions_have_choices_too(gateway: Served, client: openai.OpenAI) -> None:
    gateway.fake.script = THREE
    whole = client.completions.create(model=ENDPOINT, prompt="Once", n=3)
    chunks = list(client.completions.create(model=ENDPOINT, prompt="Once", n=3, stream=True))

    expected = ["a0a1", "b0b1", "c0c1c2"]
    assert [choice.text for choice in whole.choices] == expected
    assert texts_by_index(chunks, lambda choice: choice.text) == dict(enumerate(expected))


def test_a_record_counts_all_choices_and_keeps_all_texts(
    gateway: Served, client: openai.OpenAI
) -> None:
    gateway.fake.script = THREE
    gateway.fake.store_texts = True
    client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, n=3)

    record = gateway.fake.wait_for_records()[0]
    assert (record.outcome, record.finish_reason) == ("ok", "length")
    assert (record.prompt_tokens, record.completion_tokens) == (7, 8)
    assert record.completion == "a0a1\n\nb0b1\n\nc0c1c2"


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_one_choice_is_a_fault_of_the_answer(
    gateway: Served, client: openai.OpenAI, stream: bool
) -> None:
    fault = Failure("slot_lost", "The engine was lost.", 502)
    gateway.fake.script = [*THREE[:3], [failure_row(2, fault)]]

    def ask() -> None:
        list(client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, n=3, stream=stream))

    with pytest.raises(openai.APIError) as raised:
        ask()

    assert raised.value.code == "slot_lost"
    assert gateway.fake.wait_for_records()[0].outcome == "slot_lost"


def test_log_probabilities_come_with_their_text(gateway: Served, client: openai.OpenAI) -> None:
    gateway.fake.script = TOLD
    answer = client.chat.completions.create(
        model=ENDPOINT, messages=MESSAGES, logprobs=True, top_logprobs=2
    )

    assert gateway.fake.requests[0].sampling.logprobs == 2
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.refusal is None
    content = told.content or []
    assert [each.token for each in content] == [r"\xf0\x9f", r"\x99\x82", " yes"]
    assert [each.logprob for each in content] == [-0.5, -0.5, -0.25]
    together = b"".join(bytes(each.bytes or []) for each in content)
    assert together.decode() == answer.choices[0].message.content == "🙂 yes"
    assert [best.token for best in content[2].top_logprobs] == [" yes", " no"]
    assert bytes(content[2].top_logprobs[1].bytes or []) == b" no"


def test_a_stream_holds_log_probabilities_back_with_their_text(
    gateway: Served, client: openai.OpenAI
) -> None:
    gateway.fake.script = TOLD
    chunks = list(
        client.chat.completions.create(
            model=ENDPOINT, messages=MESSAGES, logprobs=True, stream=True
        )
    )

    assert gateway.fake.requests[0].sampling.logprobs == 0
    texts = [
        (chunk.choices[0].delta.content, [each.token for each in told.content or []])
        for chunk in chunks
        if (told := chunk.choices[0].logprobs)
    ]
    assert texts == [("🙂", [r"\xf0\x9f", r"\x99\x82"]), (" yes", [" yes"])]


def test_completions_have_the_legacy_shape(gateway: Served, client: openai.OpenAI) -> None:
    gateway.fake.script = TOLD
    answer = client.completions.create(model=ENDPOINT, prompt="Once", logprobs=2)

    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens == [r"bytes:\xf0\x9f", r"bytes:\x99\x82", " yes"]
    assert told.token_logprobs == [-0.5, -0.5, -0.25]
    assert told.text_offset == [4, 4, 5]
    assert (told.top_logprobs or [])[2] == {" yes": -0.25, " no": -3.0}


def test_a_stream_of_completions_counts_its_offsets_on(
    gateway: Served, client: openai.OpenAI
) -> None:
    gateway.fake.script = TOLD
    chunks = list(client.completions.create(model=ENDPOINT, prompt=[1, 2], logprobs=0, stream=True))
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]

    assert [each.tokens for each in told] == [[r"bytes:\xf0\x9f", r"bytes:\x99\x82"], [" yes"]]
    # Of a prompt of token ids the gateway has no text, so that offsets count from the answer.
    assert [each.text_offset for each in told] == [[0, 0], [1]]


def test_who_does_not_ask_is_told_no_log_probabilities(
    gateway: Served, client: openai.OpenAI
) -> None:
    answer = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, logprobs=False)

    assert gateway.fake.requests[0].sampling.logprobs is None
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_what_is_out_of_range_is_named(
    gateway: Served, client: openai.OpenAI, parameters: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, **parameters)

    assert refused.value.param == param
    assert gateway.fake.requests == []


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"n": 9}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_is_out_of_range_of_completions_is_named(
    gateway: Served, client: openai.OpenAI, parameters: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=ENDPOINT, prompt="Once", **parameters)

    assert refused.value.param == param
