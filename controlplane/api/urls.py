"""Addresses under /api/v1."""

from __future__ import annotations

from django.urls import path, re_path
from drf_spectacular.views import SpectacularAPIView

from controlplane.api.access import KeyList
from controlplane.api.endpoints import EndpointDetail, EndpointList, Promote, RollBack
from controlplane.api.monitoring import RequestLogList
from controlplane.api.problems import NoSuchResource
from controlplane.api.registry import (
    ModelDetail,
    ModelList,
    VersionDetail,
    VersionList,
    VersionsOfModel,
)
from controlplane.api.slots import SlotList


class SchemaView(SpectacularAPIView):
    """The OpenAPI description, for whoever may read."""

    read_role = "viewer"


urlpatterns = [
    path("schema", SchemaView.as_view(), name="schema"),
    path("models", ModelList.as_view(), name="models"),
    path("models/<str:name>", ModelDetail.as_view(), name="model"),
    path("models/<str:name>/versions", VersionsOfModel.as_view(), name="model-versions"),
    path("versions", VersionList.as_view(), name="versions"),
    path("versions/<str:model>/<int:number>", VersionDetail.as_view(), name="version"),
    path("endpoints", EndpointList.as_view(), name="endpoints"),
    path("endpoints/<str:name>", EndpointDetail.as_view(), name="endpoint"),
    path("endpoints/<str:name>/promote", Promote.as_view(), name="promote"),
    path("endpoints/<str:name>/rollback", RollBack.as_view(), name="rollback"),
    path("slots", SlotList.as_view(), name="slots"),
    path("keys", KeyList.as_view(), name="keys"),
    path("requests", RequestLogList.as_view(), name="requests"),
    re_path(r"", NoSuchResource.as_view()),
]
