"""Chat templates: rendered as Hugging Face renders them, refused in words a caller understands."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import date
from typing import Any

import pytest

from inference.engine.chat_template import BrokenTemplate, ChatTemplate, RenderFailed, format_date
from inference.engine.template_operations import Limits

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- set loop_messages = messages %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
  {% if message["role"] == "user" %}
    {{- "[INST] " + message["content"] + "[/INST]" }}
  {% else %}
    {{- " " + message["content"] + eos_token}}
  {% endif %}
{%- endfor %}
"""

QWEN_3 = """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "user", "content": "  Guten Tag & <b>hallo</b>\n"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nJa?"},
    {"role": "user", "content": "{{ 7 * 7 }} 🙂"},
]


def test_a_conversation_becomes_turns_and_an_open_answer() -> None:
    text = ChatTemplate(CHATML, tokens={}).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", [CHATML, LLAMA_3, MISTRAL, QWEN_3])
def test_the_text_is_that_of_hugging_face(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        conversations=[CONVERSATION], chat_template=source, add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(source, tokens=TOKENS).render(CONVERSATION) == expected[0]


def test_a_message_is_text_and_no_template() -> None:
    text = ChatTemplate(CHATML, tokens={}).render([{"role": "user", "content": "{{ 7 * 7 }}"}])
    assert "{{ 7 * 7 }}" in text


def test_what_the_template_says_about_the_messages_reaches_the_caller() -> None:
    template = ChatTemplate(MISTRAL, tokens=TOKENS)
    with pytest.raises(RenderFailed, match="roles must alternate") as caught:
        template.render([{"role": "assistant", "content": "Hi"}])
    assert caught.value.is_refusal


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0].content.index('x') }}", "not found"),
        ("{{ raise_exception }}", "cannot be used as a value"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "ran longer than 0.1 s"),
        ("{% for i in range(99999) %}{{ messages }}{% endfor %}", "output is longer than 1000 characters"),
    ],
)  # fmt: skip
def test_a_template_that_fails_tells_why(source: str, message: str) -> None:
    template = ChatTemplate(source, tokens={}, limits=Limits(seconds=0.1, output=1000))
    with pytest.raises(RenderFailed, match=message) as caught:
        template.render([{"role": "user", "content": "Hi"}])
    assert not caught.value.is_refusal


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ ''.__class__ }}", "line 1: the name '__class__' is not available"),
        ("\n\n{{ 1|pprint }}", "line 3: the filter 'pprint' is not available"),
        ("{{ " + "(" * 5000, "recursion"),
        ("{% for x in [1] %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
        ("{{ " + "9" * 5000 + " }}", "4300 digits"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_loaded(
    source: str, message: str
) -> None:
    with pytest.raises(BrokenTemplate, match=message):
        ChatTemplate(source, tokens={})


def test_the_date_is_the_days_and_never_the_hours() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", tokens={}, today=lambda: date(2026, 3, 7)
    )
    assert template.render([]) == "07 Mar 2026"
    clock = ChatTemplate("{{ strftime_now('%H:%M') }}", tokens={})
    with pytest.raises(RenderFailed, match="does not know '%H'"):
        clock.render([])


@pytest.mark.parametrize("day", [date(2024, 2, 29), date(2025, 12, 31), date(2026, 9, 6)])
def test_a_date_reads_as_from_strftime_in_the_c_locale(day: date) -> None:
    pattern = "%A %a, %d. %B %b %m %j %Y %y 100%%"
    assert format_date(day, pattern) == day.strftime(pattern)


def test_threads_share_a_template_and_each_has_its_own_meter() -> None:
    source = "{% for m in messages %}{% for i in range(m.content|int) %}.{% endfor %}{% endfor %}"
    template = ChatTemplate(source, tokens={}, limits=Limits(seconds=5.0, output=3000))
    results: dict[int, Any] = {}

    def render(length: int) -> None:
        try:
            results[length] = len(template.render([{"role": "user", "content": str(length)}]))
        except RenderFailed:
            results[length] = "failed"

    lengths = [1000, 2000, 3000, 3001, 4000]
    threads = [threading.Thread(target=render, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {1000: 1000, 2000: 2000, 3000: 3000, 3001: "failed", 4000: "failed"}


def test_a_template_cannot_change_the_messages_of_its_caller() -> None:
    messages: list[Mapping[str, str]] = [{"role": "user", "content": "Hi"}]
    source = "{% set messages = messages + [{'role': 'x'}] %}{{ messages|length }}"
    assert ChatTemplate(source, tokens={}).render(messages) == "2"
    assert messages == [{"role": "user", "content": "Hi"}]
