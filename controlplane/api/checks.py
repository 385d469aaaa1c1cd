"""When the control process is ready: its database answers.

Redis is no condition: with Redis away the admin and the API still show what is decided, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection

from controlplane.health import NotReady


async def check_database(_resources: Mapping[str, Any]) -> str:
    """A query goes through.

    Raises:
        NotReady: it does not.
    """
    # Not in the thread of the views: a view that hangs must not make the probe hang with it.
    return await sync_to_async(_query, thread_sensitive=False)()


def _query() -> str:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        raise NotReady(f"The database does not answer: {error}") from error
    finally:
        connection.close()
    return connection.vendor
