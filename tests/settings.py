"""Settings of the test suite: those of the control process, with a fast password hasher.

The database is SQLite in memory; DATABASE_URL runs the same tests on PostgreSQL.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# The environment is read once, when the settings are imported, and must not be that of whoever runs the tests.
# Nothing is put into this home.
os.environ["TATKAL_HOME"] = str(Path(tempfile.gettempdir()) / "tatkal-tests")
os.environ["TATKAL_SECRET_KEY"] = "only-for-tests-" + "x" * 50
os.environ["REDIS_URL"] = "redis://127.0.0.1:1/0"  # nobody listens there
for name in (
    "TATKAL_HTTPS",
    "TATKAL_ALLOWED_HOSTS",
    "TATKAL_SECRET_KEY_FILE",
    "PORT",
    "CONTROL_PORT",
    "TATKAL_COST_PER_HOUR",
    "TATKAL_ENGINE_SLOTS",
    "TATKAL_METRICS_PORT",
):
    os.environ.pop(name, None)

from controlplane.settings.control import *  # noqa: E402, F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ALLOWED_HOSTS = ["testserver", "127.0.0.1", "localhost"]
