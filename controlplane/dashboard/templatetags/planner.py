"""Numbers as pages show them, and what a version's page says of the room for it."""

from __future__ import annotations

from typing import Any

from django import template

from controlplane.endpoints.capacity import fits_as_candidate
from controlplane.endpoints.desk import look
from controlplane.registry.models import Version

register = template.Library()

DASH = "-"


@register.filter
def gb(num_bytes: float | None) -> str:
    """Bytes in units of 10^9."""
    return DASH if num_bytes is None else f"{num_bytes / 1e9:,.2f} GB"


@register.filter
def ms(seconds: float | None) -> str:
    """Seconds in thousandths, as exact as anybody needs."""
    return DASH if seconds is None else f"{seconds * 1e3:,.4g} ms"


@register.filter
def percent(share: float | None) -> str:
    """A share of one."""
    return DASH if share is None else f"{share * 100:.4g} %"


@register.filter
def figure(value: float | None) -> str:
    """Four digits, thousands parted."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@register.filter
def rate(value: float | None) -> str:
    """A number a second with the letter of its thousands: 312 T, 41 G."""
    if value is None:
        return DASH
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g} "


@register.simple_tag
def fit_warning(version: Any) -> str:
    """Why ``version`` cannot be loaded beside what is resident; empty where it can, or where nobody knows."""
    if not isinstance(version, Version) or not version.is_ready:
        return ""
    fit = fits_as_candidate(version, endpoint=None, report=look())
    return "" if fit.fits else fit.tell()
