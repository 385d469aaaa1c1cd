"""The admin: every list and page opens, what must not change cannot, and a key is shown once."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.access import services as access
from controlplane.access.models import ApiKey
from controlplane.events.models import Event
from controlplane.registry.models import Version
from tests.factories import make_api_key, make_endpoint, make_log_row, make_version

pytestmark = pytest.mark.django_db

OURS = sorted(
    f"{model._meta.app_label}_{model._meta.model_name}"
    for model in admin.site._registry
    if model.__module__.startswith("controlplane.")
)


@pytest.fixture(autouse=True)
def rows() -> None:
    """One of everything."""
    make_endpoint("chat", candidate=make_version(), canary_bp=100)
    make_api_key()
    make_log_row()


def test_every_kind_of_row_has_a_page() -> None:
    assert OURS == [
        "access_apikey",
        "endpoints_endpoint",
        "events_event",
        "events_outbox",
        "monitoring_requestlog",
        "registry_model",
        "registry_version",
    ]


@pytest.mark.parametrize("name", OURS)
def test_list_search_and_page_open(name: str, admin_client: Client) -> None:
    model = next(
        each
        for each in admin.site._registry
        if f"{each._meta.app_label}_{each._meta.model_name}" == name
    )
    changelist = reverse(f"admin:{name}_changelist")
    assert admin_client.get(changelist).status_code == 200
    assert admin_client.get(changelist, {"q": "chat"}).status_code == 200
    row = model._default_manager.first()
    assert row is not None
    assert admin_client.get(reverse(f"admin:{name}_change", args=[row.pk])).status_code == 200


def test_a_stranger_is_asked_to_log_in(client: Client) -> None:
    for name in OURS:
        response = client.get(reverse(f"admin:{name}_changelist"))
        assert response.status_code == 302
        assert "/admin/login/" in response.headers["Location"]


@pytest.mark.parametrize("name", [name for name in OURS if name != "access_apikey"])
def test_rows_that_come_from_services_cannot_be_added_by_hand(
    name: str, admin_client: Client
) -> None:
    assert admin_client.get(reverse(f"admin:{name}_add")).status_code == 403


@pytest.mark.parametrize("name", OURS)
def test_nothing_can_be_deleted(name: str, admin_client: Client) -> None:
    assert admin_client.post(reverse(f"admin:{name}_delete", args=[1])).status_code in (302, 403)
    assert Event.objects.exists()
    assert ApiKey.objects.exists()
    assert Version.objects.count() == 2


def test_an_issued_key_is_shown_once_and_works(admin_client: Client) -> None:
    page = admin_client.post(
        reverse("admin:access_apikey_add"), {"name": "shop", "kind": "inference"}, follow=True
    )
    assert page.status_code == 200
    text = page.content.decode()
    clear_text = next(word for word in text.split() if word.startswith("sk-tatkal-"))
    key = access.find(token=clear_text, now=timezone.now())
    assert (key.name, key.created_by) == ("shop", "admin")
    again = admin_client.get(reverse("admin:access_apikey_changelist")).content.decode()
    assert clear_text not in again
    assert Event.objects.about(f"key:{key.key_id}").get().actor == "admin"


@pytest.mark.parametrize(
    "form",
    [
        {"name": "x", "kind": "control"},
        {"name": "x", "kind": "inference", "role": "viewer"},
        {"name": "x", "kind": "inference", "expires_at_0": "2020-01-01", "expires_at_1": "00:00"},
        {"kind": "inference"},
    ],
)
def test_a_key_that_cannot_be_is_refused_in_the_form(
    form: dict[str, str], admin_client: Client
) -> None:
    page = admin_client.post(reverse("admin:access_apikey_add"), form)
    assert page.status_code == 200
    assert not ApiKey.objects.filter(name="x").exists()


@pytest.mark.parametrize("action", ["revoke", "rotate"])
def test_keys_are_revoked_and_rotated_from_the_list(action: str, admin_client: Client) -> None:
    key = ApiKey.objects.get()
    page = admin_client.post(
        reverse("admin:access_apikey_changelist"),
        {"action": action, "_selected_action": [key.pk]},
        follow=True,
    )
    key.refresh_from_db()
    if action == "revoke":
        assert key.state_at(timezone.now()) == "revoked"
    else:
        assert key.state_at(timezone.now() + timedelta(hours=25)) == "expired"
        assert ApiKey.objects.count() == 2
        assert "sk-tatkal-" in page.content.decode()


def test_only_the_description_of_a_version_can_be_changed(admin_client: Client) -> None:
    version = make_version(weights_digest="abc")
    admin_client.post(
        reverse("admin:registry_version_change", args=[version.pk]),
        {"description": "Better at trains.", "weights_digest": "def", "state": "failed"},
    )
    version.refresh_from_db()
    assert version.description == "Better at trains."
    assert (version.weights_digest, version.state) == ("abc", "ready")


def test_a_form_from_another_origin_is_refused(admin_user: object) -> None:
    client = Client(enforce_csrf_checks=True, headers={"origin": "http://evil.test"})
    client.force_login(admin_user)  # type: ignore[arg-type]
    response = client.post(reverse("admin:access_apikey_add"), {"name": "x", "kind": "inference"})
    assert response.status_code == 403
    assert not ApiKey.objects.filter(name="x").exists()


def test_cookies_are_ours_and_out_of_reach_of_scripts(admin_user: object, client: Client) -> None:
    answer = client.post(
        reverse("admin:login"), {"username": "admin", "password": "password"}, follow=False
    )
    assert answer.status_code == 302
    cookie = answer.cookies["tatkal_session"]
    assert cookie["httponly"]
    assert cookie["samesite"] == "Lax"
    assert cookie["max-age"] == 8 * 3600
