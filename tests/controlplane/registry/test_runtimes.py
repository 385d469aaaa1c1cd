"""Runtimes of versions: what their own interpreters say they have, and which are refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from controlplane.endpoints.models import place
from controlplane.registry import services
from controlplane.registry.drafts import Draft, InvalidVersion, Source
from controlplane.registry.models import Version
from controlplane.registry.runtimes import inspect
from inference.runtime import NEEDED, RuntimeRefused, describe
from tests.factories import NOW
from tests.virtual_environment import add_release, make_environment, site_packages


@pytest.fixture
def root(tmp_path: Path, settings: Any) -> Path:
    """The one allowed directory, and a file beside it that could be a model."""
    root = tmp_path / "runtimes"
    root.mkdir()
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    settings.RUNTIME_ROOTS, settings.MODEL_ROOTS = (root,), (tmp_path,)
    return root


def register(root: Path, **runtime: str) -> Version:
    draft = Draft("tiny", Source("gguf", str(root.parent / "tiny.gguf")), runtime=runtime)
    return services.register(draft=draft, actor="ada", now=NOW)


def test_an_environment_tells_its_releases_and_a_digest_of_them(root: Path) -> None:
    same, other = make_environment(root / "same"), make_environment(root / "other", numpy="1.0")

    here, there = inspect(str(same), [root]), inspect(str(other), [root])

    assert here.digest == describe().digest
    assert here.python == describe().python
    assert there.packages["numpy"] == "1.0"
    assert there.digest != here.digest


@pytest.mark.django_db
def test_a_version_records_what_its_interpreter_has_and_slots_are_told(root: Path) -> None:
    path = make_environment(root / "next", numpy="1.0")

    version = register(root, interpreter=str(path))
    placed = place(version)

    facts = inspect(str(path), [root])
    assert version.runtime["numpy"] == "1.0"
    assert version.runtime["torch"] == describe().packages["torch"]
    assert (placed.runtime, placed.runtime_digest) == (str(path), facts.digest)


@pytest.mark.django_db
def test_a_version_without_an_interpreter_runs_under_the_slots_own(root: Path) -> None:
    placed = place(register(root))

    assert (placed.runtime, placed.runtime_digest) == ("", "")


@pytest.mark.django_db
def test_a_runtime_that_lacks_packages_is_refused_by_their_names(root: Path) -> None:
    bare = make_environment(root / "bare")
    (site_packages(bare) / "others.pth").unlink()

    with pytest.raises(InvalidVersion, match=", ".join(NEEDED)) as refused:
        register(root, interpreter=str(bare))

    assert refused.value.field == "runtime"
    assert not Version.objects.exists()


@pytest.mark.parametrize("path", ["/usr", "next", "runtimes/../outside", "link", ""])
def test_a_runtime_outside_the_allowed_directories_is_refused(root: Path, path: str) -> None:
    outside = make_environment(root.parent / "outside")
    (root / "link").symlink_to(outside)
    given = {"link": str(root / "link"), "runtimes/../outside": str(root / ".." / "outside")}

    with pytest.raises(RuntimeRefused, match=r"outside the allowed|absolute"):
        inspect(given.get(path, path or str(root)), [root])


def test_a_runtime_whose_interpreter_cannot_be_run_is_refused(root: Path) -> None:
    path = make_environment(root / "next")
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").write_text("no program")

    with pytest.raises(RuntimeRefused, match="no bin/python that can be run"):
        inspect(str(path), [root])


def test_an_interpreter_that_says_nothing_in_time_is_ended(root: Path) -> None:
    path = make_environment(root / "next")
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (path / "bin" / "python").chmod(0o755)
    began_at = time.monotonic()

    with pytest.raises(RuntimeRefused, match=r"did not say within 0.3 s"):
        inspect(str(path), [root], timeout_s=0.3)

    assert time.monotonic() - began_at < 10


def test_an_interpreter_that_fails_is_refused_with_its_words(root: Path) -> None:
    path = make_environment(root / "next")
    (site_packages(path) / "sitecustomize.py").write_text("import os; os._exit(7)")

    with pytest.raises(RuntimeRefused, match="cannot say what it has: status 7"):
        inspect(str(path), [root])


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("runtime", "told"),
    [
        ({"interpreter": "/x", "torch": "2.9"}, "leave the other fields out"),
        ({"interpreter": "/" + "x" * 2000}, "must be"),
        ({"digest": "1"}, "not known"),
    ],
)
def test_a_runtime_that_is_described_wrongly_is_refused(
    root: Path, runtime: dict[str, str], told: str
) -> None:
    with pytest.raises(InvalidVersion, match=told):
        register(root, **runtime)


def test_a_further_library_changes_the_digest(root: Path) -> None:
    path = make_environment(root / "next")
    before = inspect(str(path), [root]).digest
    add_release(path, "plum", "1.0")

    assert inspect(str(path), [root]).digest != before
