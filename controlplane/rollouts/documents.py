"""Reading the values of a policy document: what is wrong is told with the name of the field, the value and the mend."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from controlplane.errors import DomainError


class InvalidPolicy(DomainError):
    """A policy that cannot be used; the message names the field, the value and the mend."""

    code = "invalid_policy"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


def read_object(value: Any, where: str) -> Mapping[str, Any]:
    """The object at ``where``."""
    if not isinstance(value, dict):
        raise InvalidPolicy(f"{where}={value!r} must be an object.")
    return value


def refuse_unknown(given: Mapping[str, Any], where: str, known: set[str]) -> None:
    """Refuse a field that is not ``known``: one that nobody reads would be a promise that nobody keeps."""
    if unknown := sorted(set(given) - known):
        raise InvalidPolicy(f"{where}.{unknown[0]} is unknown: use {', '.join(sorted(known))}.")


def read_number(
    given: Mapping[str, Any],
    key: str,
    default: float,
    *,
    low: float,
    high: float,
    where: str = "policy",
) -> float:
    """The number in ``key``, strictly between ``low`` and ``high``."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise InvalidPolicy(f"{where}.{key}={value!r} must be a number between {low} and {high}.")
    return float(value)


def read_count(given: Mapping[str, Any], key: str, default: int, where: str = "segments") -> int:
    """The whole number from 1 in ``key``."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidPolicy(f"{where}.{key}={value!r} must be a whole number from 1.")
    return value


def read_flag(
    given: Mapping[str, Any], key: str, *, default: bool = False, where: str = ""
) -> bool:
    """The truth value in ``key``."""
    value = given.get(key, default)
    if not isinstance(value, bool):
        name = f"{where}.{key}" if where else key
        raise InvalidPolicy(f"{name}={value!r} must be true or false.")
    return value


def read_list(given: Mapping[str, Any], key: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """The list in ``key``."""
    value = given.get(key, default)
    if not isinstance(value, list | tuple):
        raise InvalidPolicy(f"{key}={value!r} must be a list.")
    return tuple(value)


def read_strings(
    given: Mapping[str, Any], key: str, default: tuple[str, ...], where: str = "segments"
) -> tuple[str, ...]:
    """The list of texts in ``key``."""
    values = read_list(given, key, default)
    if not all(isinstance(value, str) for value in values):
        raise InvalidPolicy(f"{where}.{key}={list(values)!r} must be a list of texts.")
    return values
