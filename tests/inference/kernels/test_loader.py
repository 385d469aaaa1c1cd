"""Which kernel runs is chosen at the start, and said."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.config import EngineConfig, InvalidConfig
from inference.kernels import loader
from inference.kernels.loader import KernelUnavailable, choose_library
from tests.inference.kernels.native_calls import library


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that had no compiler."""
    monkeypatch.setattr(loader, "EXTENSION_SUFFIXES", [".missing"])
    loader.load_library.cache_clear()
    yield
    loader.load_library.cache_clear()


def _config(**options: str) -> EngineConfig:
    return EngineConfig(Path("unused"), **options)  # type: ignore[arg-type]


def test_the_native_kernel_is_taken_where_it_can_run() -> None:
    assert choose_library(_config()) is library()
    assert library().name.startswith("native/")


def test_torch_is_taken_where_it_is_asked_for() -> None:
    assert choose_library(_config(kernel="torch")) is None


def test_a_cuda_device_has_no_native_kernel() -> None:
    assert choose_library(_config(device="cuda")) is None
    with pytest.raises(InvalidConfig, match=r"kernel='native' cannot run here: .*device='cuda'"):
        choose_library(_config(device="cuda", kernel="native"))


@pytest.mark.usefixtures("not_built")
def test_without_the_library_torch_computes_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_library(_config()) is None
    assert "native kernel unavailable" in caplog.text
    assert "not built" in caplog.text


@pytest.mark.usefixtures("not_built")
def test_without_the_library_its_name_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"kernel='native' cannot run here: it was not built"):
        choose_library(_config(kernel="native"))


def test_a_processor_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = library().functions
    monkeypatch.setattr(functions, "tatkal_isa", lambda: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _path: functions)
    loader.load_library.cache_clear()
    try:
        with pytest.raises(KernelUnavailable, match="AVX512-VNNI"):
            loader.load_library()
    finally:
        loader.load_library.cache_clear()


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    monkeypatch.setattr(loader, "INTERFACE_VERSION", -1)
    loader.load_library.cache_clear()
    try:
        with pytest.raises(KernelUnavailable, match="version"):
            loader.load_library()
    finally:
        loader.load_library.cache_clear()
