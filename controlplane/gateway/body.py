"""JSON bodies: from bytes to plain values, and from a plain value to a checked one.

Every refusal is an ``InvalidRequest`` that names the parameter. Nothing here recurses into the body, so its
nesting costs nothing; the shapes that are accepted are at most five levels deep.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from controlplane.errors import DomainError

MAX_NUMBER_LENGTH = 40
MAX_SHOWN = 60

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class InvalidRequest(DomainError):
    """The body cannot be served as it is; ``param`` names what to mend."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, message: str, *, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that ``body`` holds.

    A number beyond every use is an infinity here, so that the check of its parameter refuses it by name.

    Raises:
        InvalidRequest: no JSON, not in UTF-8, not an object, or nested too deeply.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_int=_read_int)
    except RecursionError as error:
        raise _invalid_json("is nested too deeply") from error
    except ValueError as error:
        raise _invalid_json("is not valid JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise _invalid_json("is not a JSON object")
    return value


def show(value: Any) -> str:
    """A short, safe picture of a caller's value for an error message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def check_text(name: str, value: Any) -> str:
    """``value`` as text that UTF-8 can carry; a lone surrogate cannot."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} holds half of a surrogate pair, which is no character; send valid Unicode.",
            param=name,
        ) from error
    return value


def check_label(name: str, value: Any, *, longest: int) -> str:
    """``value`` as text of at most ``longest`` characters without NUL, which databases cannot hold."""
    text = check_text(name, value)
    if len(text) > longest or "\x00" in text:
        raise InvalidRequest(
            f"{name} has {len(text)} characters; send at most {longest}, and no NUL.", param=name
        )
    return text


def check_flag(name: str, value: Any) -> bool:
    """``value`` as true or false."""
    if not isinstance(value, bool):
        raise wrong_type(name, value, "true or false")
    return value


def check_integer(name: str, value: Any) -> int:
    """``value`` as a whole number of at most 64 bits; JSON's true is none."""
    if type(value) is not int:
        raise wrong_type(name, value, "a whole number")
    if not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"{name} does not fit into 64 bits.", param=name)
    return value


def check_number(name: str, value: Any) -> float:
    """``value`` as a finite number."""
    if type(value) is not int and type(value) is not float:
        raise wrong_type(name, value, "a number")
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number.", param=name)
    return float(value)


def check_list(name: str, value: Any, *, longest: int) -> list[Any]:
    """``value`` as a list of 1 to ``longest`` elements."""
    if not isinstance(value, list):
        raise wrong_type(name, value, "a list")
    if not 1 <= len(value) <= longest:
        raise InvalidRequest(f"{name} has {len(value)} elements; send 1 to {longest}.", param=name)
    return value


def check_object(name: str, value: Any, *, longest: int) -> dict[str, Any]:
    """``value`` as an object of at most ``longest`` members."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    if len(value) > longest:
        raise InvalidRequest(
            f"{name} has {len(value)} members; send at most {longest}.", param=name
        )
    return value


def check_token_id(name: str, key: str) -> int:
    """The token id that an object's key spells, in its one canonical form."""
    if not _TOKEN_ID.fullmatch(key):
        raise InvalidRequest(f"{name} key {show(key)} must be a token id.", param=name)
    return int(key)


def refuse_unknown(name: str, value: dict[str, Any], known: Iterable[str]) -> None:
    """Refuse the first member of ``value`` that is not ``known`` and not null."""
    known_names = set(known)
    for key, member in value.items():
        if key not in known_names and member is not None:
            param = (f"{name}.{key}" if name else key)[:MAX_SHOWN]
            raise InvalidRequest(
                f"Unknown parameter: {show(param)}.", param=param, code="unknown_parameter"
            )


def missing(name: str) -> InvalidRequest:
    """A required parameter is absent."""
    return InvalidRequest(
        f"Missing required parameter: {name}.", param=name, code="missing_required_parameter"
    )


def wrong_type(name: str, value: Any, expected: str) -> InvalidRequest:
    """A parameter is of another JSON type than expected."""
    return InvalidRequest(
        f"{name} must be {expected}, not {show(value)}.", param=name, code="invalid_type"
    )


def unsupported(name: str, value: Any) -> InvalidRequest:
    """A parameter that OpenAI knows, with a value that would change what we answer."""
    return InvalidRequest(
        f"{name}={show(value)} is not supported here; leave it out.",
        param=name,
        code="unsupported_parameter",
    )


def _invalid_json(what: str) -> InvalidRequest:
    return InvalidRequest(f"The request body {what}.", param=None, code="invalid_json")


def _read_int(text: str) -> int | float:
    # Beyond 4,300 digits int() itself refuses, and beyond 308 float() cannot follow.
    if len(text) <= MAX_NUMBER_LENGTH:
        return int(text)
    return -math.inf if text.startswith("-") else math.inf
