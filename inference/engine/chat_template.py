"""A model's chat template: messages in, the text of the prompt out.

The template comes with the weights and is a stranger's program, so that it runs in ``sandbox``. It is rendered as
Hugging Face renders it, and the same messages give the same text on every slot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime

from jinja2 import TemplateError, TemplateRuntimeError, TemplateSyntaxError

from inference.engine.sandbox import Sandbox
from inference.engine.template_operations import METER, Limits

MAX_MESSAGE = 500

# Whatever a template can provoke: each is its author's or the messages' fault, none is ours.
FAILURES = (
    *(TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    *(RecursionError, MemoryError, SyntaxError),
)

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class BrokenTemplate(ValueError):
    """A chat template that cannot be used at all: it does not compile, or wants what the sandbox refuses."""


class RenderFailed(ValueError):
    """These messages cannot be rendered; ``is_refusal`` when the template itself says so to the caller."""

    def __init__(self, message: str, *, is_refusal: bool) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class _Refused(TemplateRuntimeError):
    """What a template raises by ``raise_exception``."""


class ChatTemplate:
    """A compiled chat template; threads may share it.

    ``tokens`` are the template's variables for special tokens, such as ``bos_token``. ``literals`` are the texts
    that the template itself may write.

    Raises:
        BrokenTemplate: it is not a template, or uses what is on no list of the sandbox.
    """

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str],
        limits: Limits | None = None,
        today: Callable[[], date] = lambda: datetime.now(UTC).date(),
    ) -> None:
        self._tokens = dict(tokens)
        self._limits = limits or Limits()

        def strftime_now(pattern: str) -> str:
            return format_date(today(), pattern)

        self._sandbox = Sandbox({"raise_exception": _raise_exception, "strftime_now": strftime_now})
        try:
            self._template, self.literals = self._sandbox.compile_template(source)
        except FAILURES as error:
            raise BrokenTemplate(f"the chat template cannot be used: {_one_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text, up to where the assistant's answer begins.

        Raises:
            RenderFailed: the template refuses the messages, fails on them, or passes a limit of time or size.
        """
        variables = {
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._sandbox.render(self._template, variables, self._limits)
        except _Refused as error:
            raise RenderFailed(
                f"the chat template refuses the messages: {_one_line(error)}", is_refusal=True
            ) from error
        except FAILURES as error:
            raise RenderFailed(
                f"the chat template failed on the messages: {_one_line(error)}", is_refusal=False
            ) from error


def format_date(day: date, pattern: str) -> str:
    """``day`` in English, by the directives of ``strftime`` that name a day, month or year.

    The time of day is not on offer: a request that is run again must render to the same text.

    Raises:
        ValueError: the pattern holds another directive.
    """
    month, weekday = _MONTHS[day.month - 1], _DAYS[day.weekday()]
    parts = {
        "A": weekday, "a": weekday[:3], "B": month, "b": month[:3], "d": f"{day.day:02d}", "m": f"{day.month:02d}",
        "j": f"{day.timetuple().tm_yday:03d}", "Y": f"{day.year:04d}", "y": f"{day.year % 100:02d}", "%": "%",
    }  # fmt: skip

    def part(match: re.Match[str]) -> str:
        if match[1] not in parts:
            raise ValueError(
                f"strftime_now does not know {match[0]!r}; use one of %{' %'.join(parts)}."
            )
        return parts[match[1]]

    return re.sub(r"%(.?)", part, pattern, flags=re.DOTALL)


def _raise_exception(message: object) -> None:
    METER.get().weigh(message)
    raise _Refused(str(message))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TemplateSyntaxError):
        text = f"line {error.lineno}: {error.message}."
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"
