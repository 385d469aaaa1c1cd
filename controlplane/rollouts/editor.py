"""A policy as a form: its document in fields and rows, and back, with each complaint beside the field that it is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django import forms

from controlplane.rollouts.policy_forms import METRICS, STEPS, TRAFFIC, Head, Rows, values_of

# What the form does not show is kept as it was.
KEPT = ("discovery",)
_PATH = re.compile(r"(?:policy\.)?(\w+)(?:\[(\d+)\])?(?:\.([^=: ]+))?")


class Editor:
    """The forms of one policy. ``base`` is the document that it begins with."""

    def __init__(
        self, base: Mapping[str, Any], data: Any = None, *, name: str = "", description: str = ""
    ) -> None:
        self._base = base
        self.head = Head(data, initial={**_head_of(base), "name": name, "description": description})
        self.steps = STEPS(data, initial=list(base.get("steps", ())), prefix="steps")
        self.metrics = METRICS(data, initial=_metrics_of(base), prefix="metrics")
        self.traffic = TRAFFIC(data, initial=list(base.get("traffic", ())), prefix="traffic")
        self.complaints: dict[str, list[str]] = {}

    @property
    def parts(self) -> tuple[tuple[str, Rows], ...]:
        """The lists of rows, by their names in the document."""
        return ("steps", self.steps), ("metrics", self.metrics), ("traffic", self.traffic)

    def is_valid(self) -> bool:
        """Whether every field is what it must be by itself."""
        # No short cut: every part is to say what it complains of.
        return all(
            [self.head.is_valid(), *(rows.is_valid() for _, rows in self.parts), self._is_named()]
        )

    def document(self) -> dict[str, Any]:
        """The document that the forms say; call it when they are valid."""
        head = self.head.cleaned_data
        plain = (
            "alpha",
            "block_s",
            "min_coverage",
            "in_flight",
            "standby_s",
            "prepare_s",
            "deadline_s",
        )
        segments = {
            "keys": head["segment_keys"],
            "minimum": head["segment_minimum"],
            "crossings": _crossings(head["crossings"]) or None,
        }
        document: dict[str, Any] = {
            **{name: head[name] for name in plain},
            "users_once_per_block": head["users_once_per_block"] or None,
            "promote": {"yes": True, "no": False}.get(head["promote"]),
            "segments": _without_none(segments) or None,
            "metrics": {row.cleaned_data["name"]: _metric(row) for row in self.metrics.filled()},
            "steps": [values_of(row) for row in self.steps.filled()],
            "traffic": [_traffic(row) for row in self.traffic.filled()] or None,
        }
        return _without_none(document) | {
            name: self._base[name] for name in KEPT if name in self._base
        }

    def blame(self, message: str) -> None:
        """Put a complaint of the service beside the field, the row or the part that it names, or else on top."""
        part, row, field = self._find(message)
        if row is not None:
            row.add_error(field if field in row.fields else None, message)
        elif part in ("steps", "metrics", "traffic"):
            self.complaints.setdefault(part, []).append(message)
        else:
            self.head.add_error(field if field in self.head.fields else None, message)

    def _find(self, message: str) -> tuple[str, forms.Form | None, str]:
        found = _PATH.match(message)
        if found is None:
            return "", None, ""
        part, index, rest = found[1], found[2], found[3] or ""
        if part == "metrics":
            told = message.removeprefix("metrics.")
            rows = [row for row in self.metrics.filled() if _begins(told, row.cleaned_data["name"])]
            row = max(rows, key=lambda each: len(each.cleaned_data["name"]), default=None)
            field = told.removeprefix(row.cleaned_data["name"]) if row else ""
            return part, row, _first_word(field)
        if part in ("steps", "traffic") and index is not None:
            filled = dict(self.parts)[part].filled()
            return part, filled[int(index)] if int(index) < len(filled) else None, _first_word(rest)
        if part == "segments":
            return (
                part,
                None,
                {"keys": "segment_keys", "minimum": "segment_minimum"}.get(rest, rest),
            )
        return part, None, part

    def _is_named(self) -> bool:
        """Whether every gate has a name of its own."""
        names: set[str] = set()
        for row in self.metrics.filled():
            name = row.cleaned_data["name"]
            if not name or name in names:
                row.add_error("name", "Give the gate a name that no other has.")
            names.add(name)
        return all(not row.errors for row in self.metrics.forms)


def with_more_rows(data: Any, part: str) -> Any:
    """What was sent, with one more empty row in ``part``."""
    more = data.copy()
    total = f"{part}-TOTAL_FORMS"
    more[total] = str(int(more.get(total) or 0) + 1)
    return more


def _head_of(document: Mapping[str, Any]) -> dict[str, Any]:
    segments = document.get("segments", {})
    promote = document.get("promote")
    return {
        **document,
        "segment_keys": segments.get("keys"),
        "segment_minimum": segments.get("minimum"),
        "crossings": ", ".join("+".join(keys) for keys in segments.get("crossings", ())),
        "promote": "" if promote is None else "yes" if promote else "no",
    }


def _metrics_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {**rule, "name": name, "not_critical": not rule.get("critical", True)}
        for name, rule in document.get("metrics", {}).items()
    ]


def _metric(row: forms.Form) -> dict[str, Any]:
    values = values_of(row)
    values.pop("name", None)
    if values.pop("not_critical", False):
        values["critical"] = False
    return values


def _traffic(row: forms.Form) -> dict[str, Any]:
    return {"segment": {}, **values_of(row)}


def _crossings(text: str) -> list[list[str]]:
    listed = [part.split("+") for part in text.split(",") if part.strip()]
    return [[key.strip() for key in keys] for keys in listed]


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "")}


def _begins(text: str, name: str) -> bool:
    return text.startswith(name) and text[len(name) : len(name) + 1] in (".", ":", "=", " ", "")


def _first_word(text: str) -> str:
    return re.split(r"[=: .\[]", text.lstrip("."), maxsplit=1)[0]
