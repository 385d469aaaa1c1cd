"""Times of Redis as the API writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def to_iso(epoch_s: float) -> str | None:
    """ISO 8601, in UTC; None for 0, which stands where there is no such time."""
    return datetime.fromtimestamp(epoch_s, tz=UTC).isoformat() if epoch_s else None
