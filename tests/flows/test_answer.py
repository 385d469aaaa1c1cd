"""A newcomer's first minutes: one command, and a real model answers the `openai` package and `curl`."""

from __future__ import annotations

import asyncio
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.faults.instance import Instance
from tests.inference.slot_process import ROOT, wait_until

REAL_ENGINE = {
    "TATKAL_ENGINE": "inference.engine.llm_engine:LLMEngine.load",
    "TATKAL_ENGINE_SLOTS": "1",
}
QUESTION = "What is the capital of France?"
MODEL = "smollm2"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def instance(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    home = tmp_path_factory.mktemp("answer") / "home"
    with Instance(prepared_home, home, max_requests=64, **REAL_ENGINE) as instance:
        yield instance


@pytest.fixture
def client(instance: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{instance.run['gateway_url']}/v1",
        api_key=instance.run["api_key"],
        max_retries=0,
        timeout=60,
    ) as client:
        yield client


def _ask(client: openai.OpenAI, text: str = QUESTION, **parameters: Any) -> str:
    sent: dict[str, Any] = {"temperature": 0, "max_tokens": 32, **parameters}
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **sent
    )
    text_of: str | None = answer.choices[0].message.content
    return text_of or ""


def _ask_streamed(client: openai.OpenAI, text: str = QUESTION) -> str:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    received = list(chunks)
    assert received[-1].usage is not None
    return "".join(chunk.choices[0].delta.content or "" for chunk in received if chunk.choices)


def test_the_capital_of_france_is_paris_streamed_and_not(client: openai.OpenAI) -> None:
    answer = _ask(client)

    assert "Paris" in answer
    assert _ask_streamed(client) == answer


def test_counts_reason_and_headers_are_those_of_the_answer(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    answer = raw.parse()

    assert raw.headers["x-model-version"] == "smollm2-135m-instruct/1"
    assert int(raw.headers["x-tatkal-generation"]) >= 1
    assert raw.headers["x-request-id"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = _ask(client)

    assert _ask(client, stop=["Par"]) == whole[: whole.index("Par")]


def test_a_seed_repeats_its_answer_and_another_one_does_not(client: openai.OpenAI) -> None:
    def tell(seed: int) -> str:
        return _ask(client, "Write a line about rain.", temperature=1.0, seed=seed)

    assert tell(1) == tell(1)
    assert len({tell(seed) for seed in range(1, 5)}) > 1


def test_choices_differ_and_the_first_is_the_answer_of_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a line about rain."}],
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 3,
    }
    one = client.chat.completions.create(**asked)
    three = client.chat.completions.create(**asked, n=3)
    streamed: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason

    texts = [choice.message.content for choice in three.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert streamed == dict(enumerate(texts))
    assert reasons == {each.index: each.finish_reason for each in three.choices}
    assert one.usage is not None
    assert three.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens > one.usage.completion_tokens


def test_log_probabilities_are_those_of_the_text_streamed_and_not(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Reply with only this emoji: 🙂🎉"}],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    told = whole.logprobs.content if whole.logprobs else None
    streamed = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]

    assert told
    assert streamed == told
    assert b"".join(bytes(token.bytes or []) for token in told).decode() == whole.message.content
    for token in told:
        best = [each.logprob for each in token.top_logprobs]
        assert token.logprob == best[0] == max(best)  # the answer is a greedy one
        assert len(best) == 3


def test_completions_tell_log_probabilities_in_the_legacy_shape(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    choice = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0, logprobs=2
    ).choices[0]

    told = choice.logprobs
    assert told is not None
    assert told.tokens
    assert "".join(told.tokens) == choice.text
    whole = prompt + choice.text
    for token, offset in zip(told.tokens, told.text_offset or [], strict=True):
        assert whole.startswith(token, offset)
    for logprob, best in zip(told.token_logprobs or [], told.top_logprobs or [], strict=True):
        assert logprob == max(best.values())
        assert len(best) == 2


def test_an_emoji_is_never_half_delivered(client: openai.OpenAI) -> None:
    question = "Reply with only this emoji: 🙂🎉"
    whole = _ask(client, question)

    assert any(ord(character) > 0xFFFF for character in whole)
    assert "\N{REPLACEMENT CHARACTER}" not in whole
    assert _ask_streamed(client, question) == whole


def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        _ask(client, store=True)

    assert refused.value.param == "store"


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        _ask(client, "word " * 9_000)

    assert refused.value.code == "context_length_exceeded"
    assert "8192" in refused.value.message


def test_a_client_that_leaves_frees_its_place(instance: Instance, client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a very long story."}],
        max_tokens=2_000,
        logit_bias={"0": -100, "2": -100},  # no end before that, however slowly we read
        stream=True,
    )
    next(iter(chunks))
    with instance.redis() as redis:
        assert list(redis.scan_iter("req:*"))
        chunks.close()
        wait_until(lambda: not list(redis.scan_iter("req:*")), timeout_s=5)


async def test_many_streams_at_once_all_end_with_a_reason(instance: Instance) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{instance.run['gateway_url']}/v1",
        api_key=instance.run["api_key"],
        max_retries=0,
        timeout=120,
    ) as client:

        async def chat(index: int) -> str | None:
            reason = None
            async for chunk in await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Tell me story number {index}."}],
                max_tokens=16,
                stream=True,
            ):
                reason = chunk.choices[0].finish_reason or reason
            return reason

        reasons = await asyncio.gather(*(chat(index) for index in range(32)))

    assert set(reasons) <= {"stop", "length"}


def test_the_printed_command_answers_when_pasted(instance: Instance) -> None:
    printed = instance.output.read_text()
    command = printed[printed.index("curl http") :].partition("\n\n")[0].replace("\\\n", " ")

    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)

    assert '"finish_reason"' in done.stdout


def test_the_facts_of_the_run_are_in_a_private_file(instance: Instance) -> None:
    path = instance.home.path / "run.json"

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {
        "gateway_url",
        "control_url",
        "api_key",
        "control_token",
        "admin_user",
        "admin_password",
        "endpoint",
    } <= instance.run.keys()


def test_a_second_start_on_the_same_home_says_so(instance: Instance) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "prepare", "--run"],
        cwd=ROOT,
        env={"TATKAL_HOME": str(instance.home.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert "is in use by process" in done.stderr


@pytest.mark.parametrize("name", ["gateway", "engine-0"])
def test_a_process_that_dies_is_started_again(
    instance: Instance, client: openai.OpenAI, name: str
) -> None:
    pid = instance.send(name, signal.SIGKILL)

    def answers() -> bool:
        try:
            return "Paris" in _ask(client)
        except (openai.APIStatusError, openai.APIConnectionError):
            return False

    wait_until(answers, timeout_s=60)
    assert instance.pid(name) != pid


def test_every_request_is_in_the_log_without_its_text(
    instance: Instance, client: openai.OpenAI
) -> None:
    _ask(client)

    wait_until(lambda: bool(instance.call("GET", "requests")["results"]), timeout_s=10)
    line = instance.call("GET", "requests")["results"][0]
    assert line["version"] == "smollm2-135m-instruct/1"
    assert not line.get("prompt")
    for log in instance.home.logs.glob("*.log"):
        assert QUESTION not in log.read_text(errors="replace")


def test_health_tells_life_from_readiness(instance: Instance) -> None:
    for url in (instance.run["gateway_url"], instance.run["control_url"]):
        assert httpx.get(f"{url}/livez", timeout=5).status_code == httpx.codes.OK
        assert httpx.get(f"{url}/readyz", timeout=5).status_code == httpx.codes.OK
