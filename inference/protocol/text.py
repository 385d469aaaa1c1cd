"""The one way a message becomes text, and a value again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def dumps(value: Any) -> str:
    """Compact JSON; a number that JSON does not know is our own bug and raises ``ValueError``."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without those that say nothing, so that who does not know a new field is not sent it in vain."""
    return {
        name: value
        for name, value in values.items()
        if name not in defaults or value != defaults[name]
    }


def known_fields(message: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``data`` the dataclass ``message`` has a field for; a later release may say more.

    Not for what is asked of a slot: one that ignored a parameter would give another answer than was asked for.
    """
    return {each.name: data[each.name] for each in fields(message) if each.name in data}
