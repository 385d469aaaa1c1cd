"""What every anticipated failure of the control plane has in common."""

from __future__ import annotations

from http import HTTPStatus


class DomainError(Exception):
    """An anticipated failure, told to the caller as it is.

    Subclasses stand beside the function that raises them. ``code`` is stable and may be matched by
    programs, ``status`` is the HTTP status, and ``permanent`` says that trying again cannot help.
    ``retry_after_s`` is set where the caller should wait that long before trying again.
    """

    code: str = "error"
    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    permanent: bool = True

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
