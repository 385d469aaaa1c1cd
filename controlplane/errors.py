"""What every anticipated failure of the control plane has in common."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class DomainError(Exception):
    """An anticipated failure, told to the caller as it is.

    Subclasses stand beside the function that raises them. ``code`` is stable and may be matched by
    programs, ``status`` is the HTTP status, and ``permanent`` says that trying again cannot help.
    ``retry_after_s`` is set where the caller should wait that long before trying again, and ``details`` hold what a
    program needs to go on, such as the state that the request missed.
    """

    code: str = "error"
    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    permanent: bool = True

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.details = details or {}
