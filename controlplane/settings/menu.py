"""The menu of the admin: what stands where, and who sees it."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import reverse, reverse_lazy


def page(title: str, icon: str, model: str, description: str) -> dict[str, Any]:
    """An entry of the menu for the list of ``app.model``, shown to whoever may see its rows."""
    app, name = model.split(".")

    def may_view(request: HttpRequest) -> bool:
        return request.user.has_perm(f"{app}.view_{name}")

    return {
        "title": title,
        "icon": icon,
        "link": reverse_lazy(f"admin:{app}_{name}_changelist"),
        "permission": may_view,
        "description": description,
    }


def is_at_endpoints(request: HttpRequest) -> bool:
    """The lists of slots and dead letters lie below that of the endpoints, and have entries of their own."""
    others = [reverse(f"admin:endpoints_{name}") for name in ("slots", "dead-letters")]
    is_below = request.path.startswith(reverse("admin:endpoints_endpoint_changelist"))
    return is_below and request.path not in others


def is_at_log(request: HttpRequest) -> bool:
    """As with the slots: the page of the sums lies below that of the log."""
    is_usage = request.path == reverse("admin:monitoring_usage")
    return (
        request.path.startswith(reverse("admin:monitoring_requestlog_changelist")) and not is_usage
    )


MENU = {
    "Serving": [
        {
            **page(
                "Endpoints",
                "alt_route",
                "endpoints.endpoint",
                "Which version answers, and the way back.",
            ),
            "active": is_at_endpoints,
        },
        page("Models", "category", "registry.model", "Lines of versions."),
        page("Versions", "deployed_code", "registry.version", "Register one, and watch it load."),
        {
            **page(
                "Slots", "memory", "endpoints.endpoint", "Engine processes, and what they hold."
            ),
            "link": reverse_lazy("admin:endpoints_slots"),
        },
        {
            **page(
                "Planner",
                "calculate",
                "registry.version",
                "What fits, how fast, and what it costs.",
            ),
            "link": reverse_lazy("dashboard:planner"),
        },
        {
            **page(
                "Dead letters",
                "heart_broken",
                "endpoints.endpoint",
                "Requests that were given up.",
            ),
            "link": reverse_lazy("admin:endpoints_dead-letters"),
        },
    ],
    "Rollouts": [
        page(
            "Rollouts",
            "route",
            "rollouts.rollout",
            "Candidates that earn their traffic, and why they wait.",
        ),
        page("Policies", "rule", "rollouts.policy", "What a candidate has to show, step by step."),
    ],
    "Traffic": [
        {
            **page(
                "Request log",
                "list_alt",
                "monitoring.requestlog",
                "Every request, and how it ended.",
            ),
            "active": is_at_log,
        },
        {
            **page(
                "Usage",
                "payments",
                "monitoring.requestlog",
                "What versions and keys used and cost.",
            ),
            "link": reverse_lazy("admin:monitoring_usage"),
        },
        page(
            "Feedback", "thumbs_up_down", "monitoring.feedback", "What callers thought of answers."
        ),
        page(
            "Flagged terms", "flag", "monitoring.flaggedterm", "Words that no answer should hold."
        ),
    ],
    "Access": [
        page("API keys", "key", "access.apikey", "For applications and for engineers' tools."),
        page("Users", "person", "auth.user", "People who log in here."),
        page("Groups", "group", "auth.group", "What groups of people may do."),
    ],
    "Audit": [
        page("Events", "history", "events.event", "Who changed what, when and why."),
        page("Outbox", "outbox", "events.outbox", "Changes on their way to Redis."),
    ],
}
