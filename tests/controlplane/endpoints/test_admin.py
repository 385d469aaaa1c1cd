"""The pages of an endpoint: what they show, who may press which button, and what pressing it does."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse

from controlplane.endpoints import admin as pages
from controlplane.endpoints import desk, publication
from controlplane.endpoints.models import Endpoint
from controlplane.events.models import Event
from inference.protocol import Resident
from inference.queue import Queue
from inference.replicas import Member
from tests.controlplane.api.test_dead_letters import give_up
from tests.factories import NOW, hold_ready, make_endpoint, make_version

pytestmark = pytest.mark.django_db

MOVES = ("promote", "rollback", "candidate", "settings")


@pytest.fixture(autouse=True)
def endpoint(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """``chat`` with tiny/2 live and tiny/1 to go back to; both, and tiny/3, are ready."""
    connect(queue, monkeypatch)
    first, second = make_version(), make_version()
    make_version()
    endpoint = make_endpoint("chat", live=second, previous=first)
    publication.publish(name="chat", queue=queue, now=NOW)
    hold_ready(queue, "chat", "tiny/1", "tiny/2", "tiny/3")
    return endpoint


def connect(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pages, desk):
        monkeypatch.setattr(module, "connection", lambda: queue)


def log_in(role: str = "", *, csrf: bool = False) -> Client:
    """A browser of a person in the group of ``role``."""
    user = User.objects.create_user(role or "guest", password="x", is_staff=True)
    if role:
        user.groups.add(Group.objects.get(name=role))
    client = Client(enforce_csrf_checks=csrf)
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def at(endpoint: Endpoint, move: str) -> str:
    return reverse(f"admin:endpoints_endpoint_{move}", args=[endpoint.pk])


def read(client: Client, path: str, status: int = 200) -> str:
    response = client.get(path)
    assert response.status_code == status
    return response.content.decode()


def send(client: Client, path: str, **fields: Any) -> str:
    """The page on which one ends."""
    response = client.post(path, fields, follow=True)
    assert response.status_code == 200
    return response.content.decode()


def now(endpoint: Endpoint) -> Endpoint:
    return Endpoint.objects.with_versions().get(pk=endpoint.pk)


def test_the_page_shows_roles_readiness_lanes_and_what_was_done(endpoint: Endpoint) -> None:
    text = read(log_in("viewer"), at(endpoint, "change"))
    for shown in ("tiny/2", "tiny/1", "slot-chat-tiny-2", "ready", "published", "created"):
        assert shown in text


def test_a_viewer_sees_no_buttons_and_cannot_press_them(endpoint: Endpoint) -> None:
    client = log_in("viewer")
    text = read(client, at(endpoint, "change"))
    for move in MOVES:
        assert at(endpoint, move) not in text
        assert client.get(at(endpoint, move)).status_code == 403
        assert client.post(at(endpoint, move), {"leave": "tiny/2"}).status_code == 403
    assert client.get(reverse("admin:endpoints_endpoint_add")).status_code == 403
    assert now(endpoint).generation == 1


def test_staff_without_a_role_see_nothing(endpoint: Endpoint) -> None:
    client = log_in()
    read(client, at(endpoint, "change"), 403)
    read(client, reverse("admin:endpoints_slots"), 403)
    read(client, reverse("admin:endpoints_endpoint_changelist"), 403)


def test_a_stranger_is_asked_to_log_in(endpoint: Endpoint) -> None:
    for move in ("change", *MOVES):
        assert "/admin/login/" in Client().get(at(endpoint, move)).headers["Location"]


@pytest.mark.parametrize("role", ["engineer", "approver"])
def test_an_engineer_promotes_with_a_reason(endpoint: Endpoint, role: str) -> None:
    client = log_in(role)
    text = read(client, at(endpoint, "promote"))
    assert "tiny/3 (no role, ready)" in text
    assert 'value="tiny/2"' not in text
    text = send(
        client, at(endpoint, "promote"), version="tiny/3", reason="better", expected_generation=1
    )
    assert "tiny/3 is live" in text
    assert now(endpoint).live.name == "tiny/3"
    event = Event.objects.get(type="endpoint.promoted")
    assert (event.actor, event.reason) == (role, "better")


def test_a_promote_without_a_reason_asks_for_one(endpoint: Endpoint) -> None:
    text = send(
        log_in("engineer"), at(endpoint, "promote"), version="tiny/3", expected_generation=1
    )
    assert "This field is required" in text
    assert now(endpoint).generation == 1


def test_who_decided_on_an_old_page_is_told_and_nothing_changes(endpoint: Endpoint) -> None:
    client = log_in("engineer")
    send(client, at(endpoint, "settings"), **settings(endpoint, queue_cap=9))
    text = send(
        client, at(endpoint, "promote"), version="tiny/3", reason="x", expected_generation=1
    )
    assert "somebody changed it" in text
    assert now(endpoint).live.name == "tiny/2"


def test_looking_at_the_rollback_page_does_nothing_and_one_click_acts(endpoint: Endpoint) -> None:
    client = log_in("engineer")
    text = read(client, at(endpoint, "rollback"))
    assert "Roll back now" in text
    assert now(endpoint).generation == 1
    text = send(client, at(endpoint, "rollback"), leave="tiny/2")
    assert "tiny/1 is live" in text
    assert now(endpoint).live.name == "tiny/1"


def test_a_double_click_does_not_bring_the_bad_version_back(endpoint: Endpoint) -> None:
    client = log_in("engineer")
    send(client, at(endpoint, "rollback"), leave="tiny/2")
    text = send(client, at(endpoint, "rollback"), leave="tiny/2")
    assert "Nothing to change: tiny/1 is live" in text
    assert now(endpoint).generation == 2


def test_the_reason_is_added_after_the_rollback(endpoint: Endpoint) -> None:
    client = log_in("engineer")
    text = send(client, at(endpoint, "rollback"), leave="tiny/2")
    sequence = Event.objects.get(type="endpoint.rolled_back").sequence
    path = reverse("admin:endpoints_endpoint_reason", args=[endpoint.pk, sequence])
    assert path in text
    assert "rolled_back" in read(client, path)
    text = send(client, path, reason="it swore")
    assert "it swore" in text
    assert path not in text


def test_a_rollback_to_a_version_that_is_not_ready_says_so_first(
    endpoint: Endpoint, queue: Queue
) -> None:
    queue._redis.hdel("slots", "slot-chat-tiny-1")
    client = log_in("engineer")
    assert "Roll back all the same" in read(client, at(endpoint, "rollback"))
    text = send(client, at(endpoint, "rollback"), leave="tiny/2", force="")
    assert "No slot holds tiny/1 ready" in text
    send(client, at(endpoint, "rollback"), leave="tiny/2", force="on")
    assert now(endpoint).live.name == "tiny/1"


def test_a_candidate_is_set_with_a_share_in_per_cent_and_let_go(endpoint: Endpoint) -> None:
    client = log_in("engineer")
    path = at(endpoint, "candidate")
    text = send(client, path, candidate="tiny/3", percent="2.5", expected_generation=1)
    assert "2.5 %" in text
    assert (now(endpoint).candidate.name, now(endpoint).canary_bp) == ("tiny/3", 250)  # type: ignore[union-attr]
    assert "Choose a candidate" in send(client, path, percent="1", expected_generation=2)
    send(client, path, candidate="", percent="0", expected_generation=2)
    assert now(endpoint).candidate is None


def settings(endpoint: Endpoint, **changed: Any) -> dict[str, Any]:
    values = {
        "queue_cap": 256,
        "deadline_s": 300,
        "in_flight": "finish",
        "standby_s": 3600,
        "reason": "",
        "expected_generation": now(endpoint).generation,
    }
    return values | changed


def test_settings_are_changed_and_a_wrong_one_is_said_beside_the_field(endpoint: Endpoint) -> None:
    client = log_in("engineer")
    path = at(endpoint, "settings")
    send(client, path, **settings(endpoint, in_flight="cut", store_texts="on"))
    assert (now(endpoint).in_flight, now(endpoint).store_texts) == ("cut", True)
    assert "greater than or equal to 1" in send(client, path, **settings(endpoint, queue_cap=0))
    text = send(client, path, **settings(endpoint, standby_s=10**12))
    assert "less than or equal to 2592000" in text


def test_an_endpoint_is_created_by_form(queue: Queue) -> None:
    client = log_in("engineer")
    version = Endpoint.objects.get().live
    path = reverse("admin:endpoints_endpoint_add")
    new = {"name": "search", "live": version.pk, "queue_cap": 9, "deadline_s": 60}
    policy = {"in_flight": "finish", "standby_s": 60}
    text = send(client, path, **new, **policy, reason="for the shop")
    assert "Endpoint search is created" in text
    assert queue.read_route("search") is not None
    assert Event.objects.about("endpoint:search").get().reason == "for the shop"
    text = send(client, path, **new | {"name": "Sea rch"}, **policy)
    assert "Use lower-case letters" in text


def test_slots_are_listed_with_what_they_hold() -> None:
    text = read(log_in("viewer"), reverse("admin:endpoints_slots"))
    assert "slot-chat-tiny-3" in text
    assert "instant" in text
    assert "fingerprint f1" in text
    assert "12.5 tokens/s, 2.0 rows a step" in text
    assert "MBU 0.42, MFU 0.07" in text


def test_with_redis_away_pages_open_and_a_rollback_is_decided(
    endpoint: Endpoint, absent_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(absent_queue, monkeypatch)
    client = log_in("engineer")
    assert "Redis is away" in read(client, at(endpoint, "change"))
    for name in ("admin:endpoints_slots", "admin:endpoints_dead-letters"):
        assert "Redis is away" in read(client, reverse(name))
    version = reverse("admin:registry_version_change", args=[endpoint.live.pk])
    assert "Redis is away, so nobody knows" in read(client, version)
    assert "unknown" in read(client, reverse("admin:endpoints_endpoint_changelist"))
    text = send(client, at(endpoint, "rollback"), leave="tiny/2")
    assert "Redis is away; it is published as soon as" in text
    assert now(endpoint).live.name == "tiny/1"


def test_a_form_from_another_origin_is_refused(endpoint: Endpoint) -> None:
    client = log_in("engineer", csrf=True)
    for move in MOVES:
        assert client.post(at(endpoint, move), {"leave": "tiny/2"}).status_code == 403
    assert now(endpoint).generation == 1


def test_the_page_itself_takes_no_form(endpoint: Endpoint) -> None:
    client = log_in("engineer")
    assert client.post(at(endpoint, "change"), {"live": 1}).status_code == 405
    assert (
        client.get(reverse("admin:endpoints_endpoint_change", args=["nonsense"])).status_code == 404
    )


def test_slots_are_searched_and_filtered_and_a_form_that_is_filled_in_stays() -> None:
    client, path = log_in("viewer"), reverse("admin:endpoints_slots")
    for query, shown in (
        ("version=tiny/1", [1]),
        ("q=TINY-3", [3]),
        ("state=ready&endpoint=chat", [1, 2, 3]),
        ("state=failed", []),
        ("endpoint=gone", []),
        ("version=tiny/1&q=tiny/2", []),
    ):
        text = read(client, f"{path}?{query}")
        assert [n for n in (1, 2, 3) if f"<strong>slot-chat-tiny-{n}</strong>" in text] == shown
        assert ("No slot fits" in text) == (not shown)
    assert client.get(f"{path}?q=tiny").headers["Refresh"] == "3"
    page = client.get(f"{path}?version=tiny/1&narrow")
    assert "Refresh" not in page.headers
    assert '<option value="tiny/1" selected>' in page.content.decode()


def test_dead_letters_are_listed_the_newest_first_and_searched(queue: Queue) -> None:
    client, path = log_in("viewer"), reverse("admin:endpoints_dead-letters")
    assert "No request was given up" in read(client, path)
    give_up(queue, 3)
    give_up(queue, 201, endpoint="code")
    text = read(client, path)
    assert text.index("code-200") < text.index("code-199")
    assert "code-0<" not in text
    assert "4 older ones fit as well" in text
    text = read(client, f"{path}?endpoint=chat&q=CHAT-1")
    assert "chat-1" in text
    assert "chat-2" not in text
    assert "No request fits" in read(client, f"{path}?q=nothing")
    assert log_in().get(path).status_code == 403


def test_a_version_page_shows_who_holds_it_and_how_loading_it_fails(
    endpoint: Endpoint, queue: Queue
) -> None:
    member = Member(queue, "engine-2", lease_ms=60_000)
    member.renew()
    resident = Resident("chat", "tiny/3", "/artifacts/3")
    failure = member.begin_load(resident, 2)
    path = reverse(
        "admin:registry_version_change", args=[make_version().model.versions.all()[2].pk]
    )
    client = log_in("viewer")
    assert "it is being tried" in read(client, path)
    member.fail_load(failure, "NotEnoughMemory: <9 GiB> & more.")
    text = read(client, path)
    assert "chat, engine-2 at 20" in text
    assert "NotEnoughMemory: &lt;9 GiB&gt; &amp; more. After 2 tries" in text
    assert "After 2 tries, the next try is at 20" in text
    assert "engine-2 at 20" in read(client, reverse("admin:endpoints_slots"))
    assert "slot-chat-tiny-3 for chat: ready" in text
    text = read(client, reverse("admin:registry_version_change", args=[endpoint.live.pk]))
    assert "NotEnoughMemory" not in text
