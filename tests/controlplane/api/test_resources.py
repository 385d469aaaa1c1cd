"""Query parameters: what is not known is refused by name, on every address, and pages have a size that can be."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import URLPattern
from rest_framework.mixins import ListModelMixin

from controlplane.api.urls import urlpatterns
from tests.factories import make_control_token, make_endpoint, make_rollout, make_version

pytestmark = pytest.mark.django_db

# Django's test client is no browser: what an address needs in its place.
PARTS = {
    "<str:name>": "chat", "<str:model>": "tiny", "<int:number>": "1", "<int:pk>": "1", "<str:rollout>": "1",
}  # fmt: skip
# The schema takes what drf-spectacular takes.
EXEMPT = ("", "schema")


def addresses() -> dict[str, Any]:
    """Every address under /api/v1 with what stands in its place, and the view behind it."""
    found = {}
    for pattern in urlpatterns:
        assert isinstance(pattern, URLPattern)
        path = str(pattern.pattern)
        for part, value in PARTS.items():
            path = path.replace(part, value)
        if path not in EXEMPT:
            found[f"/api/v1/{path}"] = pattern.callback.view_class  # type: ignore[attr-defined]
    return found


ADDRESSES = addresses()
LISTS = sorted(
    path for path, view in ADDRESSES.items() if issubclass(view, ListModelMixin) or view.is_paged
)


@pytest.fixture(autouse=True)
def rows() -> None:
    endpoint = make_endpoint("chat", live=make_version(model="chat"))
    make_rollout(endpoint, make_version(model="chat"), key=PARTS["<str:rollout>"])


@pytest.fixture
def engineer() -> Client:
    token = make_control_token("engineer")
    return Client(headers={"authorization": f"Bearer {token}"})


@pytest.mark.parametrize("path", sorted(ADDRESSES))
def test_an_unknown_parameter_is_refused_by_name_and_nothing_is_done(
    engineer: Client, path: str
) -> None:
    for method in ("get", "post", "patch", "delete"):
        if not hasattr(ADDRESSES[path], method):
            continue
        response = getattr(engineer, method)(f"{path}?outcom=ok&page_sice=3")
        assert response.status_code == 400, (method, response.content)
        problem = response.json()
        assert sorted(problem["errors"]) == ["outcom", "page_sice"]
        assert "There is no such query parameter" in problem["errors"]["outcom"][0]


def test_the_refusal_names_the_known_parameters(engineer: Client) -> None:
    told = engineer.get("/api/v1/requests?outcom=ok").json()["errors"]["outcom"]
    known = "endpoint, version, outcome, since, until, cursor, page_size"
    assert told == [f"There is no such query parameter; known are {known}."]
    told = engineer.get("/api/v1/models/tiny?x=1").json()["errors"]["x"]
    assert told == ["There is no such query parameter; there are none here."]


def test_there_are_lists() -> None:
    assert {"/api/v1/models", "/api/v1/keys", "/api/v1/requests", "/api/v1/endpoints"} <= set(LISTS)


@pytest.mark.parametrize("path", LISTS)
def test_a_page_that_cannot_be_is_refused(engineer: Client, path: str) -> None:
    for size in ("0", "501", "-1", "many", "", "1.5", "\N{ARABIC-INDIC DIGIT THREE}"):
        response = engineer.get(path, {"page_size": size})
        assert response.status_code == 400, response.content
        assert "must be from 1 to 500" in response.json()["errors"]["page_size"][0]
    assert engineer.get(path, {"page_size": "500"}).status_code in (200, 503)


def test_a_state_that_no_version_has_is_refused(engineer: Client) -> None:
    problem = engineer.get("/api/v1/versions?state=redy").json()
    assert (problem["status"], list(problem["errors"])) == (400, ["state"])
