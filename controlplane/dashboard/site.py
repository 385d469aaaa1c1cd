"""Addresses of the pages, below the admin's own."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from controlplane.dashboard import serving

app_name = "dashboard"
urlpatterns = [path("planner/", admin.site.admin_view(serving.planner_view), name="planner")]
