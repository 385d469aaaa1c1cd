"""Virtual environments for versions to run under: with the packages of the tests' own, and others before them."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def make_environment(path: Path, **releases: str) -> Path:
    """An environment that finds all that this one has; ``releases`` are further distributions, which hold nothing.

    With one of them everything there computes the same, and is not of the same release.
    """
    venv.create(path, with_pip=False, symlinks=True)
    packages = site_packages(path)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, release in releases.items():
        add_release(path, name, release)
    return path


def add_release(path: Path, name: str, release: str) -> None:
    """Say that the environment has ``name`` in ``release``."""
    folder = site_packages(path) / f"{name}-{release}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")


def site_packages(path: Path) -> Path:
    """Where packages of the environment lie."""
    (found,) = (path / "lib").glob("python3*/site-packages")
    return found
