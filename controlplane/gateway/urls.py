"""URLs of the gateway process: OpenAI's API, and the probes."""

from __future__ import annotations

from django.urls import path, re_path

from controlplane import health
from controlplane.gateway import views

urlpatterns = [
    path("v1/chat/completions", views.chat_completions),
    path("v1/completions", views.completions),
    path("v1/feedback", views.feedback),
    path("v1/models", views.models),
    path("v1/models/<path:name>", views.model),
    *health.urlpatterns,
    # Last: Django's own 404 is a sync view, which costs a thread hop.
    re_path("", views.unknown_path),
]

handler400 = views.bad_request
handler500 = views.server_error
