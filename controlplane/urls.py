"""Addresses of the control process: admin, REST, health."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from controlplane import health

urlpatterns = [
    *health.urlpatterns,
    path("", RedirectView.as_view(pattern_name="admin:index", permanent=False)),
    path("admin/", include("controlplane.dashboard.site")),
    path("admin/", admin.site.urls),
    path("api/v1/", include("controlplane.api.urls")),
]
