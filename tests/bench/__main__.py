"""`make bench`: what the path adds to a request, how fast the way back is, and how fast the plain engine is.

Every figure comes with another one of the same run, because the same machine is faster at one hour than at the next:
read the ratios, and compare absolute numbers only within one output.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys

from tests.bench import engine, flip, path

SECTIONS = {"path": path.measure, "flip": flip.measure, "engine": engine.measure}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default all")
    sections = parser.parse_args().sections or list(SECTIONS)
    if unknown := sorted(set(sections) - set(SECTIONS)):
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}.")
    say(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name in sections:
        for line in SECTIONS[name]():
            say(line)
    return 0


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
