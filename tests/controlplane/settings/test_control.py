"""What the settings of the control process make of the environment and the machine."""

from __future__ import annotations

import os
import runpy
from typing import Any

import pytest

from controlplane.settings import control

GIB = 2**30


def read_settings(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, Any]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(control.__file__)


def test_postgresql_is_waited_for_with_a_bound_that_the_url_may_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "postgresql://ada@db/tatkal?connect_timeout=9&sslmode=require"
    options = read_settings(monkeypatch, DATABASE_URL=url)["DATABASES"]["default"]["OPTIONS"]
    assert options["options"] == "-c statement_timeout=30000 -c lock_timeout=10000"
    assert (int(options["connect_timeout"]), options["sslmode"]) == (9, "require")
    other = read_settings(monkeypatch, DATABASE_URL="sqlite:///x")["DATABASES"]["default"]
    assert "options" not in other["OPTIONS"]


@pytest.mark.parametrize(("pages", "limit"), [(2 * GIB, 64 * GIB), (2 * 2**20, 8 * GIB)])
def test_an_import_may_use_what_the_machine_has_and_at_most_64_gib(
    monkeypatch: pytest.MonkeyPatch, pages: int, limit: int
) -> None:
    told = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}
    monkeypatch.setattr(os, "sysconf", told.__getitem__)
    assert read_settings(monkeypatch)["IMPORT_MEMORY_BYTES"] == limit


def test_where_the_machine_does_not_tell_an_import_may_use_64_gib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def be_unknown(_: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", be_unknown)
    assert read_settings(monkeypatch)["IMPORT_MEMORY_BYTES"] == 64 * GIB
