"""Issuing keys, taking them back, and what gateways are told."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import DatabaseError, transaction
from django.forms.models import model_to_dict

from controlplane.access import services
from controlplane.access.cache import KeyRecord, digest_key, parse_key
from controlplane.access.models import ApiKey
from controlplane.events.models import Event
from inference.queue import Queue
from tests.factories import NOW, make_api_key, make_control_token

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(hours=1)


def test_a_key_is_found_by_its_clear_text_which_is_stored_nowhere() -> None:
    issued = services.issue(name="shop", kind="inference", actor="ada", now=NOW)
    assert services.find(token=issued.clear_text, now=NOW) == issued.key
    everything = f"{model_to_dict(issued.key)} {[event.payload for event in Event.objects.all()]}"
    secret = issued.clear_text.split("-", 3)[3]
    assert secret not in everything
    assert issued.key.digest == digest_key(issued.clear_text)
    assert issued.clear_text.endswith(issued.key.last4)


def test_gateways_can_parse_the_keys_of_applications_and_no_control_token() -> None:
    key_id = parse_key(make_api_key())
    assert ApiKey.objects.inference().filter(key_id=key_id).exists()
    assert parse_key(make_control_token()) is None


@pytest.mark.parametrize("token", ["", "sk-tatkal", "' OR 1=1 --", "sk-tatkal-abc-" + "x" * 43])
def test_what_was_never_issued_opens_nothing(token: str) -> None:
    with pytest.raises(services.InvalidToken):
        services.find(token=token, now=NOW)


def test_another_secret_under_a_known_id_opens_nothing() -> None:
    token = make_control_token()
    with pytest.raises(services.InvalidToken):
        services.find(token=token[:-1] + ("a" if token[-1] != "a" else "b"), now=NOW)


def test_an_applications_key_is_no_control_token() -> None:
    with pytest.raises(services.InvalidToken):
        services.authenticate_control(token=make_api_key(), now=NOW)
    assert services.authenticate_control(token=make_control_token(), now=NOW).role == "viewer"


def test_a_revoked_key_opens_nothing_and_revoking_twice_is_one_event() -> None:
    issued = services.issue(name="shop", kind="inference", actor="ada", now=NOW)
    for _ in range(2):
        services.revoke(key_id=issued.key.key_id, actor="ada", now=LATER, reason="leaked")
    with pytest.raises(services.InvalidToken):
        services.find(token=issued.clear_text, now=LATER)
    assert Event.objects.filter(type="key.revoked", reason="leaked").count() == 1


def test_a_key_ends_at_its_expiry_and_not_before() -> None:
    issued = services.issue(name="shop", kind="inference", actor="ada", now=NOW, expires_at=LATER)
    assert services.find(token=issued.clear_text, now=LATER - timedelta(microseconds=1))
    with pytest.raises(services.InvalidToken):
        services.find(token=issued.clear_text, now=LATER)


def test_after_a_rotation_both_keys_work_until_the_overlap_is_over() -> None:
    old = services.issue(name="shop", kind="inference", actor="ada", now=NOW)
    new = services.rotate(
        key_id=old.key.key_id, actor="ada", now=NOW, overlap=timedelta(minutes=10)
    )
    assert services.find(token=old.clear_text, now=NOW + timedelta(minutes=9))
    with pytest.raises(services.InvalidToken):
        services.find(token=old.clear_text, now=NOW + timedelta(minutes=10))
    assert services.find(token=new.clear_text, now=LATER).name == "shop"


def test_a_rotation_never_prolongs_the_old_key() -> None:
    soon = NOW + timedelta(minutes=1)
    old = services.issue(name="shop", kind="inference", actor="ada", now=NOW, expires_at=soon)
    services.rotate(key_id=old.key.key_id, actor="ada", now=NOW)
    assert ApiKey.objects.get(pk=old.key.pk).expires_at == soon


def test_an_ended_key_cannot_be_rotated() -> None:
    issued = services.issue(name="shop", kind="inference", actor="ada", now=NOW)
    services.revoke(key_id=issued.key.key_id, actor="ada", now=NOW)
    with pytest.raises(services.KeyEnded, match="revoked"):
        services.rotate(key_id=issued.key.key_id, actor="ada", now=NOW)


@pytest.mark.parametrize(
    ("kind", "role", "named"),
    [
        ("inference", "viewer", "role"),
        ("control", "", "role"),
        ("control", "owner", "role"),
        ("other", "", "kind"),
    ],
)
def test_a_key_that_cannot_be_is_refused_by_service_and_database(
    kind: str, role: str, named: str
) -> None:
    with pytest.raises(services.InvalidKeyRequest, match=named):
        services.issue(name="x", kind=kind, role=role, actor="ada", now=NOW)
    with pytest.raises(DatabaseError), transaction.atomic():
        ApiKey.objects.create(
            key_id="x", name="x", kind=kind, role=role, digest="", last4="", created_at=NOW
        )


def test_a_name_and_a_future_expiry_are_required() -> None:
    with pytest.raises(services.InvalidKeyRequest, match="name"):
        services.issue(name=" ", kind="inference", actor="ada", now=NOW)
    with pytest.raises(services.InvalidKeyRequest, match="past"):
        services.issue(name="x", kind="inference", actor="ada", now=NOW, expires_at=NOW)


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("viewer", {"viewer"}),
        ("engineer", {"viewer", "engineer"}),
        ("approver", {"viewer", "engineer", "approver"}),
    ],
)
def test_a_role_may_what_the_roles_below_it_may(role: str, allowed: set[str]) -> None:
    key = services.find(token=make_control_token(role), now=NOW)
    assert {each for each in ("viewer", "engineer", "approver") if key.has_role(each)} == allowed


def test_publishing_tells_gateways_which_keys_work_and_which_ended(queue: Queue) -> None:
    works = services.issue(name="shop", kind="inference", actor="ada", now=NOW)
    ended = services.issue(name="old", kind="inference", actor="ada", now=NOW)
    token = services.issue(name="ada", kind="control", role="viewer", actor="ada", now=NOW)
    services.revoke(key_id=ended.key.key_id, actor="ada", now=NOW)
    assert services.publish(queue=queue, now=NOW) == 2
    published = {
        issued.key.name: read_key(queue, issued.key.key_id) for issued in (works, ended, token)
    }
    assert published["shop"] == KeyRecord(digest=works.key.digest, name="shop")
    assert published["old"] is not None
    assert published["old"].revoked
    assert published["ada"] is None


def read_key(queue: Queue, key_id: str) -> KeyRecord | None:
    text = queue._redis.get(f"key:{key_id}")
    return KeyRecord.from_json(text) if text else None


def test_a_key_that_is_limited_to_endpoints_is_published_so_and_its_successor_too(
    queue: Queue,
) -> None:
    first = services.issue(
        name="shop", kind="inference", endpoints=["chat", "code"], actor="ada", now=NOW
    ).key
    second = services.rotate(key_id=first.key_id, actor="ada", now=NOW).key
    services.publish(queue=queue, now=NOW)
    for key in (first, second):
        record = KeyRecord.from_json(queue._redis.get(f"key:{key.key_id}"))
        assert (record.allows("code"), record.allows("search")) == (True, False)
    assert Event.objects.about(f"key:{first.key_id}").earliest("pk").data["endpoints"] == [
        "chat",
        "code",
    ]


@pytest.mark.parametrize(
    ("kind", "role", "endpoints"),
    [
        ("control", "viewer", ["chat"]),
        ("inference", "", ["Chat"]),
        ("inference", "", [""]),
        ("inference", "", ["a" * 65]),
        ("inference", "", [f"e{n}" for n in range(101)]),
    ],
)
def test_endpoints_that_a_key_cannot_have_are_refused(
    kind: str, role: str, endpoints: list[str]
) -> None:
    with pytest.raises(services.InvalidKeyRequest, match="endpoint"):
        services.issue(name="x", kind=kind, role=role, endpoints=endpoints, actor="ada", now=NOW)
