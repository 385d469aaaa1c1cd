"""What each process loads: a fresh interpreter imports what the process imports, and looks at what came with it.

Import contracts read the source; this sees what really happens, through settings, app registries and libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

HEAVY = ("torch", "transformers", "evidently", "pandas", "sentence_transformers")
CONTROL = "controlplane.settings.control"
GATEWAY = "controlplane.settings.gateway"
DJANGO = "import django; django.setup();"

REPORT = "import json, sys; print(json.dumps(sorted({name for name in sys.modules})))"

# Process: settings, what it runs up to its first request or task, what must not have come along.
PROCESSES = {
    "gateway": (
        GATEWAY,
        "import controlplane.asgi; from django.urls import get_resolver; get_resolver().url_patterns",
        (*HEAVY, "rest_framework", "django.contrib.admin", "celery", "controlplane.events.models"),
    ),
    "control": (
        CONTROL,
        "import controlplane.asgi; from django.urls import get_resolver; get_resolver().url_patterns",
        (*HEAVY, "controlplane.gateway", "controlplane.tasks"),
    ),
    "tasks": (
        CONTROL,
        f"import controlplane.celery; {DJANGO} import controlplane.tasks.control",
        (*HEAVY, "controlplane.gateway"),
    ),
    "beat": (
        CONTROL,
        f"from controlplane.celery import app; {DJANGO} app.finalize()",
        (*HEAVY, "controlplane.gateway", "controlplane.tasks"),
    ),
    # kombu takes one class from django.utils wherever Django is installed; settings and models are what must stay away.
    "engine": (
        "",
        "import inference.worker, inference.engine.llm_engine",
        ("django.conf", "django.apps", "django.db", "controlplane", "transformers"),
    ),
    # Torch comes with the first version, so that a slot which has none costs little.
    "idle engine": ("", "import inference.worker", (*HEAVY, "tokenizers", "controlplane")),
    "importer": ("", "import inference.importers.__main__", ("torch", "transformers", "django")),
    "ready": (
        "",
        "import controlplane.cli.main",
        (*HEAVY, "django", "inference", "celery", "redis"),
    ),
}


def load(statements: str, *, settings: str, home: Path) -> set[str]:
    """Names of the modules of a fresh interpreter that ran ``statements``."""
    environment = {
        "PATH": os.environ["PATH"],
        "TATKAL_HOME": str(home),
        "TATKAL_SECRET_KEY": "x" * 50,
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "OMP_NUM_THREADS": "1",
    }
    if settings:
        environment["DJANGO_SETTINGS_MODULE"] = settings
    result = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{REPORT}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_loads_nothing_that_belongs_to_another(process: str, tmp_path: Path) -> None:
    settings, statements, forbidden = PROCESSES[process]
    modules = load(statements, settings=settings, home=tmp_path)
    assert len(modules) > 50, "an interpreter that loaded nothing proves nothing"
    assert not modules & set(forbidden)


@pytest.mark.slow
def test_the_gateway_has_no_database(tmp_path: Path) -> None:
    query = (
        "import controlplane.asgi\n"
        "from django.db import connection\n"
        "from django.core.exceptions import ImproperlyConfigured\n"
        "try:\n    connection.cursor()\n"
        "except ImproperlyConfigured as error:\n    import controlplane.health as refused\n"
        "else:\n    raise SystemExit('a query went through')\n"
    )
    assert load(query, settings=GATEWAY, home=tmp_path)
