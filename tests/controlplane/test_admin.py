"""The admin: every list and page opens, what must not change cannot, and a key is shown once."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group
from django.contrib.messages import get_messages
from django.contrib.sessions.models import Session
from django.test import Client
from django.urls import reverse, reverse_lazy
from django.utils import timezone

from controlplane.access import services as access
from controlplane.access.models import ApiKey
from controlplane.events.models import Event
from controlplane.monitoring.models import Feedback, FlaggedTerm
from controlplane.registry.models import Version
from tests.factories import (
    NOW,
    make_api_key,
    make_endpoint,
    make_log_row,
    make_rollout,
    make_version,
)

pytestmark = pytest.mark.django_db

OURS = sorted(
    f"{model._meta.app_label}_{model._meta.model_name}"
    for model in admin.site._registry
    if model.__module__.startswith("controlplane.")
)

ADDED_BY_FORM = (
    *("access_apikey", "endpoints_endpoint", "monitoring_flaggedterm", "registry_version"),
    "rollouts_policy",
)


@pytest.fixture(autouse=True)
def rows() -> None:
    """One of everything."""
    candidate = make_version()
    make_rollout(make_endpoint("chat", candidate=candidate, canary_bp=100), candidate)
    make_api_key()
    row = make_log_row()
    Feedback.objects.create(request_id=row.request_id, endpoint="chat", rating=1.0, at=NOW)
    FlaggedTerm.objects.create(term="darn")


def test_every_kind_of_row_has_a_page() -> None:
    assert OURS == [
        "access_apikey",
        "endpoints_endpoint",
        "events_event",
        "events_outbox",
        "monitoring_feedback",
        "monitoring_flaggedterm",
        "monitoring_requestlog",
        "registry_model",
        "registry_version",
        "rollouts_policy",
        "rollouts_rollout",
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


@pytest.mark.parametrize("name", [name for name in OURS if name not in ADDED_BY_FORM])
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


def shown_once(page: Any) -> str:
    """The clear text of the answer, which nothing keeps: no message for the next page, no cookie, no cache."""
    assert page.status_code == 200
    (clear_text,) = set(re.findall(r"[sc][kt]-tatkal-[a-z0-9]+-[\w-]{32,}", page.content.decode()))
    assert not list(get_messages(page.wsgi_request))
    assert clear_text not in page.cookies.output()
    assert "no-store" in page.headers["Cache-Control"]
    for session in Session.objects.all():
        assert clear_text not in str(session.get_decoded())
    assert not LogEntry.objects.filter(change_message__contains=clear_text).exists()
    secret: str = clear_text
    return secret


def test_a_rotated_key_is_shown_once_and_works(admin_client: Client) -> None:
    old = ApiKey.objects.inference().get()
    page = admin_client.post(
        reverse("admin:access_apikey_changelist"),
        {"action": "rotate", "_selected_action": [old.pk]},
    )
    key = access.find(token=shown_once(page), now=timezone.now())
    assert key.name == old.name
    old.refresh_from_db()
    assert old.expires_at is not None
    again = admin_client.get(reverse("admin:access_apikey_changelist")).content.decode()
    assert "sk-tatkal" not in again


def test_a_key_is_limited_to_endpoints_by_form(admin_client: Client) -> None:
    form = {"name": "shop", "kind": "inference", "endpoints": "chat, code  chat"}
    admin_client.post(reverse("admin:access_apikey_add"), form)
    key = ApiKey.objects.latest("pk")
    assert key.endpoints == ["chat", "code"]
    page = admin_client.get(reverse("admin:access_apikey_change", args=[key.pk]))
    assert "chat, code" in page.content.decode()
    assert (
        "chat, code" in admin_client.get(reverse("admin:access_apikey_changelist")).content.decode()
    )


def test_an_issued_key_is_shown_once_and_works(admin_client: Client) -> None:
    page = admin_client.post(
        reverse("admin:access_apikey_add"), {"name": "shop", "kind": "inference"}
    )
    clear_text = shown_once(page)
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
        {"name": "x", "kind": "inference", "endpoints": "Chat Room"},
        {"name": "x", "kind": "control", "role": "viewer", "endpoints": "chat"},
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
    )
    key.refresh_from_db()
    if action == "revoke":
        assert key.state_at(timezone.now()) == "revoked"
    else:
        assert key.state_at(timezone.now() + timedelta(hours=25)) == "expired"
        assert ApiKey.objects.count() == 2
        assert page.status_code == 200


def test_only_the_description_of_a_version_can_be_changed(admin_client: Client) -> None:
    version = make_version(weights_digest="abc")
    admin_client.post(
        reverse("admin:registry_version_change", args=[version.pk]),
        {"description": "Better at trains.", "weights_digest": "def", "state": "failed"},
    )
    version.refresh_from_db()
    assert version.description == "Better at trains."
    assert (version.weights_digest, version.state) == ("abc", "ready")


@pytest.fixture
def gguf(tmp_path: Path, settings: Any) -> str:
    """A file that could be a model, in the one allowed root."""
    settings.MODEL_ROOTS = (tmp_path,)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


REGISTER = reverse_lazy("admin:registry_version_add")


def test_a_version_is_registered_by_form_and_its_page_renews_itself(
    admin_client: Client, gguf: str
) -> None:
    assert gguf in admin_client.get(REGISTER).content.decode(), "sources are suggested"
    form = {
        "model_name": "fresh",
        "source_kind": "gguf",
        "source": gguf,
        "dtype": "bfloat16",
        "keep_quantized": "on",
        "engine_options": '{"max_num_seqs": 8}',
        "run_link": "https://mlflow.test/7",
    }
    page = admin_client.post(REGISTER, form, follow=True)
    version = Version.objects.named("fresh/1").get()
    assert (version.created_by, version.keep_quantized) == ("admin", True)
    assert version.engine_options == {"max_num_seqs": 8}
    address = reverse("admin:registry_version_change", args=[version.pk])
    assert page.redirect_chain == [(address, 302)]
    assert page.headers["Refresh"] == "2"
    assert "Refresh" in admin_client.get(reverse("admin:registry_version_changelist")).headers
    text = page.content.decode()
    assert 'name="description"' not in text, "typing would be lost"
    assert 'name="_save"' not in text

    Version.objects.filter(pk=version.pk).update(
        state="importing", import_progress={"done": 3, "total": 12, "what": "layer 3"}
    )
    assert "25 %: layer 3" in admin_client.get(address).content.decode()

    reason = "unsupported_format: tiny.gguf: magic: this is a pickle. Convert it."
    Version.objects.filter(pk=version.pk).update(state="failed", state_reason=reason)
    page = admin_client.get(address)
    assert "Refresh" not in page.headers
    assert "This kind of file is not read. tiny.gguf: magic" in page.content.decode()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_name": "Fresh"}, "lower-case letters"),
        ({"source": "/etc/passwd"}, "outside the allowed model roots"),
        ({"source_kind": "huggingface"}, "is a file"),
        ({"source_kind": "artifact", "source": "fresh/9"}, "There is no version"),
        ({"engine_options": "{"}, "Enter a valid JSON"),
        ({"engine_options": '{"block_sise": 1}'}, "block_sise"),
        ({"runtime": '{"torch": 2}'}, "quotation marks"),
        ({"run_link": "javascript:alert(1)"}, "http or https address"),
        ({"chat_template": "/etc/passwd"}, "its own template"),
    ],
)
def test_what_cannot_be_registered_is_said_beside_the_field(
    admin_client: Client, gguf: str, change: dict[str, str], told: str
) -> None:
    form = {"model_name": "fresh", "source_kind": "gguf", "source": gguf, "dtype": "bfloat16"}
    page = admin_client.post(REGISTER, form | change)
    assert page.status_code == 200
    assert told in page.content.decode()
    assert not Version.objects.filter(model__name="fresh").exists()


def test_a_ready_version_is_registered_again_from_its_weights(admin_client: Client) -> None:
    version = make_version(engine_options={"block_size": 32})
    place = reverse("admin:registry_version_register_again", args=[version.pk])
    page = admin_client.get(place, follow=True)
    initial = page.context["adminform"].form.initial
    assert (initial["source_kind"], initial["source"]) == ("artifact", version.name)
    form = {
        "model_name": "tiny",
        "source_kind": "artifact",
        "source": version.name,
        "dtype": "float32",
    }
    admin_client.post(REGISTER, form)
    child = Version.objects.latest("pk")
    assert (child.parent, child.dtype) == (version, "float32")
    text = admin_client.get(
        reverse("admin:registry_version_change", args=[child.pk])
    ).content.decode()
    assert reverse("admin:registry_version_change", args=[version.pk]) in text
    assert "Register again" not in admin_client.get(REGISTER).content.decode()


@pytest.mark.parametrize("pk", ["0", "x", "1' OR 1=1"])
def test_a_version_that_is_not_there_leads_back(admin_client: Client, pk: str) -> None:
    page = admin_client.get(reverse("admin:registry_version_change", args=[pk]))
    assert page.status_code == 302
    assert admin_client.get(REGISTER, {"from": pk}).status_code == 200


def test_pages_run_no_script_from_elsewhere(admin_client: Client) -> None:
    policy = admin_client.get(reverse("admin:index")).headers["Content-Security-Policy"]
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert rules["default-src"] == "'self'"
    assert rules["script-src"] == "'self' 'unsafe-eval'"
    assert rules["frame-ancestors"] == "'none'"


def test_ten_wrong_passwords_close_the_door_for_that_name_alone(
    admin_user: object, client: Client
) -> None:
    def log_in(username: str, password: str) -> int:
        form = {"username": username, "password": password}
        return client.post(reverse("admin:login"), form).status_code

    assert [log_in("admin", "wrong") for _ in range(10)] == [200] * 9 + [429]
    assert log_in("admin", "password") == 429, "the right one too, until the pause is over"
    assert log_in("somebody", "wrong") == 200
    AccessAttempt.objects.update(attempt_time=timezone.now() - timedelta(minutes=6))
    assert log_in("admin", "password") == 302


def test_the_menu_shows_what_a_person_may_see(client: Client, django_user_model: Any) -> None:
    person = django_user_model.objects.create_user("ada", password="x", is_staff=True)
    client.force_login(person)
    assert "Versions" not in client.get(reverse("admin:index")).content.decode()
    person.groups.add(Group.objects.get(name="viewer"))
    text = client.get(reverse("admin:index")).content.decode()
    assert "Versions" in text
    assert reverse("admin:auth_user_changelist") not in text
    assert client.get(REGISTER).status_code == 403


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
