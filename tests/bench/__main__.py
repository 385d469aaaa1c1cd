"""`make bench`: what the path adds to a request, how fast the way back is, how fast the engine is, and what slows it.

Every figure comes with another one of the same run, because the same machine is faster at one hour than at the next:
read the ratios, and compare absolute numbers only within one output.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator

from tests.bench import engine, flip, neighbour, own, path, prefix, served, shadow, versions
from tests.bench.table import FORMULAS, tell_load

# What each measures, and whether a quick run is shorter.
SECTIONS: dict[str, Callable[[bool], Iterator[str]]] = {
    "path": lambda _: path.measure(),
    "flip": lambda _: flip.measure(),
    "engine": lambda _: engine.measure(),
    "prefix": lambda is_quick: prefix.measure(is_quick=is_quick),
    "own": lambda is_quick: own.measure(is_quick=is_quick),
    "neighbour": lambda is_quick: neighbour.measure(is_quick=is_quick),
    "served": lambda is_quick: served.measure(is_quick=is_quick),
    "shadow": lambda is_quick: shadow.measure(is_quick=is_quick),
    "versions": lambda _: versions.measure(),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default all")
    parser.add_argument(
        "--quick", action="store_true", help="short rounds where a section has them; no result"
    )
    options = parser.parse_args()
    sections = options.sections or list(SECTIONS)
    if unknown := sorted(set(sections) - set(SECTIONS)):
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}.")
    say(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for line in tell_load():
        say(line)
    for name in sections:
        for line in SECTIONS[name](options.quick):
            say(line)
    for line in ("", *FORMULAS, *tell_load()):
        say(line)
    return 0


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
