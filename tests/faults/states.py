"""What the control API says of an endpoint, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def has_ready(state: Mapping[str, Any], version: str) -> bool:
    """Whether a slot holds ``version`` ready for the endpoint, in whatever role."""
    roles = state["roles"] or ()
    return any(each["version"] == version and each["is_ready"] for each in roles)


def slot_of(state: Mapping[str, Any], version: str) -> str:
    """The name of the slot that holds ``version`` ready."""
    for role in state["roles"] or ():
        for slot in role["slots"]:
            if role["version"] == version and slot["state"] == "ready":
                name: str = slot["slot"]
                return name
    raise LookupError(f"No slot holds {version} ready: {state['roles']}")
