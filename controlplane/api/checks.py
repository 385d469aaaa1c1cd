"""When the control process is ready: its database answers.

Redis is no condition: with Redis away the admin and the API still show what is decided, and say so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection

from controlplane.health import NotReady

logger = logging.getLogger(__name__)


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
        # The probe needs no token, and the error names host and user: it is for the log.
        logger.warning("database does not answer type=%s error=%s", type(error).__name__, error)
        raise NotReady("The database does not answer.") from error
    finally:
        connection.close()
    return connection.vendor
