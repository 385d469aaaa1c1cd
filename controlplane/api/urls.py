"""Addresses under /api/v1."""

from __future__ import annotations

from django.urls import path, re_path
from drf_spectacular.views import SpectacularAPIView

from controlplane.api.access import KeyList
from controlplane.api.dead_letters import DeadLetterList
from controlplane.api.endpoints import EndpointDetail, EndpointList, Promote, RollBack
from controlplane.api.monitoring import RequestLogList
from controlplane.api.plan import PlanResource
from controlplane.api.policies import PolicyDetail, PolicyList, PolicyVersion, PresetList
from controlplane.api.problems import NoSuchResource
from controlplane.api.registry import (
    ModelDetail,
    ModelList,
    VersionDetail,
    VersionList,
    VersionsOfModel,
)
from controlplane.api.resources import Resource
from controlplane.api.rollout_reads import (
    RolloutCopies,
    RolloutPairs,
    RolloutSegments,
    RolloutTimeline,
)
from controlplane.api.rollouts import (
    Abort,
    Approve,
    Pause,
    PromoteRollout,
    Resume,
    Retry,
    RollBackRollout,
    RolloutDetail,
    RolloutList,
    SetWeight,
)
from controlplane.api.slots import SlotList
from controlplane.api.usage import UsageList


class SchemaView(SpectacularAPIView):
    """The OpenAPI description, for whoever may read."""

    read_role = "viewer"


# What is read of a rollout, and what is done to it.
ROLLOUT: dict[str, type[Resource]] = {
    "timeline": RolloutTimeline,
    "segments": RolloutSegments,
    "copies": RolloutCopies,
    "pairs": RolloutPairs,
    "pause": Pause,
    "resume": Resume,
    "approve": Approve,
    "promote": PromoteRollout,
    "abort": Abort,
    "rollback": RollBackRollout,
    "retry": Retry,
    "set-weight": SetWeight,
}

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
    path("plan", PlanResource.as_view(), name="plan"),
    path("rollouts", RolloutList.as_view(), name="rollouts"),
    path("rollouts/<str:rollout>", RolloutDetail.as_view(), name="rollout"),
    *(
        path(f"rollouts/<str:rollout>/{name}", view.as_view(), name=f"rollout-{name}")
        for name, view in ROLLOUT.items()
    ),
    path("policies", PolicyList.as_view(), name="policies"),
    path("policies/<str:name>", PolicyDetail.as_view(), name="policy"),
    path("policies/<str:name>/<int:number>", PolicyVersion.as_view(), name="policy-version"),
    path("policy-presets", PresetList.as_view(), name="policy-presets"),
    path("dead-letters", DeadLetterList.as_view(), name="dead-letters"),
    path("slots", SlotList.as_view(), name="slots"),
    path("keys", KeyList.as_view(), name="keys"),
    path("requests", RequestLogList.as_view(), name="requests"),
    path("usage", UsageList.as_view(), name="usage"),
    re_path(r"", NoSuchResource.as_view()),
]
