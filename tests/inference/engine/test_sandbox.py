"""The sandbox: what a hostile template may not touch, and what it may not use up."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError, UndefinedError

from inference.engine.sandbox import Sandbox
from inference.engine.template_operations import Limits, TemplateLimit

LIMITS = Limits(seconds=0.1, output=2**20)

REFUSED_BEFORE_RUNNING = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''|attr('format') }}",
    "{{ ''|attr('__class__') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ self._TemplateReference__context }}",
    "{{ self }}",
    "{{ super() }}",
    "{% for i in [1] %}{{ loop._iterator }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ missing.__class__ }}",
    "{{ f(*[1]) }}",
    "{{ f(**{}) }}",
    "{{ 2 ** 2 }}",
    "{{ messages|pprint }}",
    "{{ messages|groupby('role') }}",
    "{{ 'a'|center(9) }}",
    "{{ 'a'|format(9) }}",
    "{{ 1 is filter }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
    "{% block a %}{% endblock %}",
    "{% autoescape true %}{% endautoescape %}",
    "{% do messages %}",
    "{% debug %}",
]

REFUSED_WHILE_RUNNING = [
    "{{ ''['__class__'] }}",
    "{% set x = missing['__class__'] %}",
    "{% set x = namespace()['__class__'] %}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__}'.format_map({}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ ['{0.__class__}'.format]|map('string')|list }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({}) }}",
    "{{ 'a'.center(9) }}",
    "{{ '%s' % 1 }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map(attribute='role.__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|selectattr('__class__')|list }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ range['__globals__'] }}",
    "{% macro m() %}{% endmacro %}{{ m['_func'] }}",
    "{% macro m() %}{% endmacro %}{{ m.name }}",
    "{% for i in [1] %}{{ loop['__class__'] }}{% endfor %}",
    "{{ namespace }}",
    "{{ namespace() }}",
    "{{ range }}",
    "{{ messages[0].items }}",
    "{{ messages() }}",
    "{{ context.environment }}",
    "{{ environment.filters }}",
]

# Each would take minutes, or gigabytes, if it were let.
TOO_MUCH = {
    "a loop without output": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that selects nothing": "{% for i in range(9) if i > 9 %}{% endfor %}" * 9
    + "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "a loop without operations": "{% for c in 'a' * 4000000 %}" + "{% set x = c %}" * 400 + "{% endfor %}",
    "a selection without operations": "{% for c in 'a' * 4000000 if " + "c and " * 90 + "not c %}{% endfor %}",
    "loops in loops": "{% for x in range(99999) %}" * 15 + "{% endfor %}" * 15,
    "a repeated text": "{{ 'a' * 1000000000 }}",
    "a repeated text behind an assignment": "{% set x = 'a' * 1000000000 %}",
    "a repeated list": "{{ [0] * 1000000000 }}",
    "a number that squares itself": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a text that doubles by ~": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a text that doubles by +": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a nested list, printed": "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a nested list, as JSON": "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}",
    "a nested list, as text": "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{% set y = n.x|string %}",
    "nested lists, compared": "{% set n = namespace(x=[], y=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{% if n.x == n.y %}{% endif %}",
    "a nested key, looked up": "{% set n = namespace(x=()) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {}[n.x] }}",
    "a nested key, got": "{% set n = namespace(x=()) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {}.get(n.x) }}",
    "a nested key, written": "{% set n = namespace(x=()) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}{% set y = {n.x: 1} %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro that hoards": "{% set x = 'a' * 400000 %}{% macro m() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{% set y = m() %}",
    "a block that hoards": "{% set x = 'a' * 400000 %}{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    "a block that hoards its own text": "{% set y %}{% for i in range(99999) %}" + "b" * 99999 + "{% endfor %}{% endset %}",
    "a long output": "{% for i in range(99999) %}" + "b" * 999 + "{% endfor %}",
    "backward searches": "{% set x = 'a' * 4000000 %}{% for i in range(999) %}{% set y = x.rfind('b' ~ 'a' * 127) %}{% endfor %}",
    "a long backward search": "{% set x = 'a' * 2000000 %}{{ x.rfind('b' ~ 'a' * 1000000) }}",
    "strips by many characters": "{% set x = 'a' * 4000000 %}{{ x.strip('b' * 1000000) }}",
    "searches": "{% set x = 'a' * 3000000 %}{% for i in range(999) %}{% if ('a' * 1000000 ~ 'b') in x %}{% endif %}{% endfor %}",
    "a replacement": "{% set x = 'a' * 2000000 %}{{ x.replace('', x) }}",
    "a replacing filter": "{% set x = 'a' * 2000000 %}{{ x|replace('a', x) }}",
    "a join": "{% set x = 'a' * 20000 %}{{ x.join(x) }}",
    "a joining filter": "{% set x = 'a' * 20000 %}{{ x|list|join(x) }}",
    "an indent": "{{ ('\n' * 1000000)|indent(1000000) }}",
    "an indented JSON": "{{ range(999)|list|tojson(indent=1000000) }}",
    "a rounding": "{{ 1|round(1000000000, 'ceil') }}",
    "many long values": "{{ range(99999)|map('replace', '1', 'a' * 100000)|list }}",
}  # fmt: skip


def render(source: str, limits: Limits = LIMITS) -> str:
    sandbox = Sandbox({})
    template, _ = sandbox.compile_template(source)
    messages = [{"role": "user", "content": "Hello"}]
    return sandbox.render(template, {"messages": messages}, limits)


@pytest.mark.parametrize("source", REFUSED_BEFORE_RUNNING)
def test_a_template_that_names_what_is_on_no_list_is_never_compiled(source: str) -> None:
    with pytest.raises(TemplateError, match=r"not available|unknown tag"):
        Sandbox({}).compile_template(source)


@pytest.mark.parametrize("source", REFUSED_WHILE_RUNNING)
def test_a_template_that_reaches_for_python_is_stopped(source: str) -> None:
    with pytest.raises((SecurityError, UndefinedError, TemplateError)):
        render(source)


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_template_that_wants_too_much_is_stopped_in_time(source: str) -> None:
    started_at = time.monotonic()
    with pytest.raises(TemplateLimit):
        render(source)
    # The longest single operation, on the largest value, is far from a second.
    assert time.monotonic() - started_at < LIMITS.seconds + 1.0


@pytest.mark.parametrize("name", ["a block that hoards", "a repeated text", "a replacing filter"])
def test_what_is_refused_was_never_in_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimit):
            render(TOO_MUCH[name], Limits(seconds=5.0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * 2**20


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_an_endless_recursion_ends_as_an_ordinary_error(source: str) -> None:
    with pytest.raises(RecursionError):
        render(source)


def test_constants_are_not_computed_while_compiling() -> None:
    started_at = time.monotonic()
    Sandbox({}).compile_template(
        "{{ ('a' * 900000000)|length }}{{ 'a'|replace('a', 'a' * 900000000) }}"
    )
    assert time.monotonic() - started_at < 0.5


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages|length }}", "1"),
        ("{{ messages[0].role|upper ~ '!' }}", "USER!"),
        ("{{ messages[0]['missing'] is defined }}", "False"),
        ("{{ messages[0].content[1:3] }}{{ messages[0].content[::-1] }}", "elolleH"),
        ("{{ ' a b '.split() }}", "['a', 'b']"),
        ("{% for k, v in messages[0].items() %}{{ loop.index }}{{ k }}={{ v }};{% endfor %}", "1role=user;2content=Hello;"),
        ("{% for i in range(9) if i is odd %}{% if i > 5 %}{% break %}{% endif %}{{ i }}{% endfor %}", "135"),
        ("{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "123"),
        ("{% macro m(x, y=2) %}<{{ x }}{{ y }}{{ caller() }}>{% endmacro %}{% call m(1) %}c{% endcall %}", "<12c>"),
        ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
        ("{% set x %}a{% endset %}{% filter upper %}{{ x }}b{% endfilter %}", "AB"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{{ messages|map(attribute='role')|join(', ') }}", "user"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{{ {'ä': [1, 'x<']}|tojson }}", '{"ä": [1, "x<"]}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ 7 // 2 }}{{ 7 % 2 }}{{ 7 / 2 }}{{ 7 - 2 }}{{ -7 }}{{ 'ab' * 2 }}", "313.55-7abab"),
        ("{{ 'x' if 1 < 2 <= 2 and 'a' in 'abc' and not false else 'y' }}", "x"),
        ("{{ none }}{{ true }}{{ missing }}{{ 1.5|int }}{{ missing|default('d') }}", "NoneTrue1d"),
    ],
)  # fmt: skip
def test_an_honest_template_works_as_in_jinja(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_template_of_too_many_characters_is_refused() -> None:
    with pytest.raises(TemplateError, match="longer than 262144 characters"):
        Sandbox({}).compile_template("a" * (256 * 2**10 + 1))
