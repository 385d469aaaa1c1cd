"""What a sandboxed template may do to values, and the meter that bounds it.

An operation weighs its operands before it works, and counts shared parts each time they occur, as printing and
comparing would. So none takes long, whatever is handed to it, and the clock is looked at between any two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateRuntimeError, Undefined, filters, pass_context, tests
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

# What a Python object costs beside its characters, in characters.
OBJECT_SIZE = 8
# One value may have this many times the characters of the output, and all values that were made this many times.
VALUE_FACTOR = 4
WORK_FACTOR = 64
# A backward search, or a strip by a set of characters, takes len(text) * len(argument) steps.
MAX_NEEDLE = 128
MAX_INT_BITS = 64
MAX_INDENT = 32
MAX_PRECISION = 20

_STRING_METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower",
    "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "title", "upper",
})  # fmt: skip
METHODS: Mapping[type, frozenset[str]] = {
    str: _STRING_METHODS,
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
}

Operation = Callable[..., Any]


class TemplateLimit(TemplateRuntimeError):
    """A rendering that took too long or grew too large."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may use: seconds, and characters of output."""

    seconds: float = 1.0
    output: int = 2**20


class Meter:
    """What one rendering has used; each method raises ``TemplateLimit`` once a limit is passed."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.seconds
        self._deadline = time.monotonic() + limits.seconds
        self._largest = limits.output * VALUE_FACTOR
        self._work_left = limits.output * WORK_FACTOR

    def tick(self) -> None:
        """Look at the clock."""
        if time.monotonic() > self._deadline:
            raise TemplateLimit(f"it ran longer than {self._seconds:g} s.")

    def reserve(self, size: int) -> None:
        """Refuse a value of ``size`` characters before it is made."""
        if size > self._largest:
            raise TemplateLimit(f"it makes a value of more than {self._largest} characters.")

    def weigh(self, *values: Any) -> int:
        """The size of plain data together, in characters.

        Raises:
            SecurityError: it holds something else than text, numbers, lists and mappings.
        """
        self.tick()
        size = 0
        stack = list(values)
        while stack:
            item = stack.pop()
            size += _own_size(item)
            self.reserve(size)
            if isinstance(item, dict):
                stack.extend(item)
                stack.extend(item.values())
            elif isinstance(item, list | tuple):
                stack.extend(item)
        return size

    def made(self, value: Any) -> Any:
        """``value``, which has just been made, once it is charged."""
        self._work_left -= self.weigh(value)
        if self._work_left < 0:
            raise TemplateLimit("it makes too many values.")
        return value


METER: ContextVar[Meter] = ContextVar("METER")


def _own_size(item: Any) -> int:
    if type(item) is str:
        return len(item) + OBJECT_SIZE
    if isinstance(item, list | tuple | dict | range):
        return (len(item) + 1) * OBJECT_SIZE
    if type(item) is int and item.bit_length() > MAX_INT_BITS:
        raise TemplateLimit(f"it makes a number of more than {MAX_INT_BITS} bits.")
    if isinstance(item, int | float | Undefined) or item is None:
        return OBJECT_SIZE
    raise SecurityError(f"a {type(item).__name__} cannot be used as a value.")


class Method:
    """A method of a plain value, on the list of ``METHODS``, bound to its owner."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result; a view of a mapping becomes a list."""
        meter = METER.get()
        meter.weigh(self._owner, *args, *kwargs.values())
        if type(self._owner) is str:
            _check_text_method(meter, self._owner, self._name, args)
        result = getattr(self._owner, self._name)(*args, **kwargs)
        if type(self._owner) is dict and self._name != "get":
            result = list(result)
        return meter.made(result)


def _check_text_method(meter: Meter, text: str, name: str, args: tuple[Any, ...]) -> None:
    if name == "join":
        _reserve_join(meter, args[0] if args else (), text)
    elif name == "replace":
        _reserve_replace(meter, text, *args[:2])
    needle = args[0] if args else ""
    if name not in ("join", "startswith", "endswith") and isinstance(needle, str):
        _check_needle(needle)


def _check_needle(needle: str) -> None:
    if len(needle) > MAX_NEEDLE:
        raise TemplateLimit(f"it searches for a text of more than {MAX_NEEDLE} characters.")


def _reserve_join(meter: Meter, items: Any, separator: Any = "") -> None:
    meter.reserve(meter.weigh(items) + len(items) * len(text_of(separator)))


def _reserve_replace(meter: Meter, text: str, old: Any = "", new: Any = "") -> None:
    old, new = text_of(old), text_of(new)
    _check_needle(old)
    meter.reserve(len(text) + text.count(old) * len(new))


def text_of(value: Any) -> str:
    """What a plain value prints as; a container as in Python, an undefined one as nothing."""
    return value if type(value) is str else str(value)


def _operation(function: Operation) -> Operation:
    # Jinja evaluates calls with constant arguments while it compiles, unless they want the context.
    @pass_context
    def call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.weigh(value, *args, *kwargs.values())
        result = function(context, value, *args, **kwargs)
        return meter.made(list(result) if isinstance(result, Iterator) else result)

    return call


def _plain(function: Operation) -> Operation:
    return _operation(lambda _context, value, *args, **kwargs: function(value, *args, **kwargs))


def _environmental(function: Operation) -> Operation:
    return _operation(
        lambda context, value, *args, **kwargs: function(
            context.environment, value, *args, **kwargs
        )
    )


def _replace(_context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = text_of(value)
    _reserve_replace(METER.get(), text, old, new)
    return text.replace(text_of(old), text_of(new), -1 if count is None else count)


def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = list(value)
    if attribute is not None:
        items = list(filters.sync_do_map(context, items, attribute=attribute))
    _reserve_join(METER.get(), items, d)
    return text_of(d).join(map(text_of, items))


def _trim(value: Any, chars: str | None = None) -> str:
    _check_needle(chars or "")
    return text_of(value).strip(chars)


def _indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = text_of(value)
    indent = width if isinstance(width, str) else " " * min(width, MAX_INDENT + 1)
    if len(indent) > MAX_INDENT:
        raise TemplateLimit(f"it indents by more than {MAX_INDENT} characters.")
    METER.get().reserve(len(text) + (text.count("\n") + 1) * len(indent))
    return filters.do_indent(text, indent, first, blank)


def _round(value: Any, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > MAX_PRECISION:
        raise TemplateLimit(f"it rounds to more than {MAX_PRECISION} places.")
    return filters.do_round(value, precision, method)  # type: ignore[arg-type]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Hugging Face's defaults: characters stay as they are, and nothing is escaped for HTML.
    if METER.get().weigh(indent, separators) > 64 or (indent or 0) > MAX_INDENT:
        raise TemplateLimit("tojson indents or separates too widely.")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces = []
    size = 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        METER.get().reserve(size)
        METER.get().tick()
        pieces.append(piece)
    return "".join(pieces)


FILTERS: Mapping[str, Operation] = {
    "abs": _plain(abs),
    "capitalize": _plain(filters.do_capitalize),
    "count": _plain(len),
    "d": _plain(filters.do_default),
    "default": _plain(filters.do_default),
    "dictsort": _plain(filters.do_dictsort),
    "first": _environmental(filters.sync_do_first),
    "float": _plain(filters.do_float),
    "indent": _plain(_indent),
    "int": _plain(filters.do_int),
    "items": _plain(filters.do_items),
    "join": _operation(_join),
    "last": _environmental(filters.do_last),
    "length": _plain(len),
    "list": _plain(list),
    "lower": _plain(filters.do_lower),
    "map": _operation(filters.sync_do_map),
    "max": _environmental(filters.do_max),
    "min": _environmental(filters.do_min),
    "reject": _operation(filters.sync_do_reject),
    "rejectattr": _operation(filters.sync_do_rejectattr),
    "replace": _operation(_replace),
    "reverse": _plain(filters.do_reverse),
    "round": _plain(_round),
    # There is no HTML here, so that nothing is escaped and everything is safe.
    "safe": _plain(text_of),
    "select": _operation(filters.sync_do_select),
    "selectattr": _operation(filters.sync_do_selectattr),
    "sort": _environmental(filters.do_sort),
    "string": _plain(text_of),
    "title": _plain(filters.do_title),
    "tojson": _plain(_to_json),
    "trim": _plain(_trim),
    "unique": _environmental(filters.do_unique),
    "upper": _plain(filters.do_upper),
}


def _question(function: Any, *, weighs: bool) -> Operation:
    @pass_context
    def call(_context: Context, value: Any, *args: Any) -> bool:
        METER.get().tick()
        if weighs:
            METER.get().weigh(value, *args)
        return bool(function(value, *args))

    return call


# Tests of a value's kind look at nothing inside it, so that they take any value: functions, loops, namespaces.
_KINDS = (
    "boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sequence",
    "string", "true", "undefined",
)  # fmt: skip
_COMPARISONS = (
    "!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "even", "ge", "greaterthan", "gt",
    "in", "le", "lessthan", "lower", "lt", "ne", "odd", "upper",
)  # fmt: skip

TESTS: Mapping[str, Operation] = {
    **{name: _question(tests.TESTS[name], weighs=False) for name in _KINDS},
    **{name: _question(tests.TESTS[name], weighs=True) for name in _COMPARISONS},
}
