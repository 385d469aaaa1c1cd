"""The process itself is killed, with a real database file: what it had committed is there, and nothing else."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["start", "promote", "roll back by verdict", "roll back what is live"]
)
def test_a_control_worker_that_is_killed_leaves_all_of_a_move_or_nothing(
    case: str, tmp_path: Path, redis_url: str
) -> None:
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "controlplane.settings.control",
        "TATKAL_HOME": str(tmp_path),
        "TATKAL_SECRET_KEY": secrets.token_hex(32),
        "TATKAL_LOG_LEVEL": "ERROR",
        "REDIS_URL": redis_url,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'tatkal.sqlite3'}",
    }
    program = f"import django; django.setup(); from tests.controlplane.rollouts.killing import main; main({case!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["killed"] >= 8
    assert 0 < told["committed"] < told["killed"]
