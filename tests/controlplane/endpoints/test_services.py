"""Endpoints: one transaction in the database, then Redis, which may be away, late or empty."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db import DatabaseError, transaction

from controlplane.endpoints import services
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.routing import residents_of, route_of
from controlplane.events.models import Event, Outbox
from inference.queue import Queue, QueueUnavailable
from inference.replicas import SlotState, SlotStatus
from tests.factories import NOW, make_endpoint, make_version

pytestmark = pytest.mark.django_db


@pytest.fixture
def absent_queue() -> Queue:
    """A queue whose server is not there."""
    return Queue("redis://127.0.0.1:1/0")


def reload(endpoint: Endpoint) -> Endpoint:
    return Endpoint.objects.with_versions().get(pk=endpoint.pk)


def test_creating_an_endpoint_writes_row_event_and_outbox_together() -> None:
    endpoint = make_endpoint("chat")
    event = Event.objects.about("endpoint:chat").get()
    assert event.type == "endpoint.created"
    assert event.data == {"generation": 1, "live": "tiny/1"}
    assert Outbox.objects.waiting("route").get().event == event
    assert not endpoint.is_published


def test_a_version_without_an_artifact_cannot_go_live() -> None:
    with pytest.raises(services.VersionNotReady, match="tiny/1 is pending"):
        make_endpoint("chat", live=make_version(state="pending"))
    assert not Endpoint.objects.exists()


def test_a_taken_name_is_told_and_leaves_no_event() -> None:
    make_endpoint("chat")
    with pytest.raises(services.EndpointExists, match="'chat' exists already"):
        make_endpoint("chat")
    assert Event.objects.about("endpoint:chat").count() == 1


@pytest.mark.parametrize("name", ["", "Chat", "a b", "a/b", "-a", "x" * 65])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(services.InvalidEndpoint):
        make_endpoint(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"canary_bp": 10_001},
        {"canary_bp": 100},
        {"name": "Chat"},
        {"queue_cap": 0},
        {"deadline_s": 0.5},
    ],
)
def test_the_database_refuses_an_endpoint_that_cannot_be(fields: dict[str, Any]) -> None:
    endpoint = make_endpoint("chat")
    with pytest.raises(DatabaseError), transaction.atomic():
        Endpoint.objects.filter(pk=endpoint.pk).update(**fields)


@pytest.mark.parametrize("role", ["previous", "candidate"])
def test_the_live_version_has_no_second_role(role: str) -> None:
    version = make_version()
    with pytest.raises(DatabaseError), transaction.atomic():
        make_endpoint("chat", live=version, **{role: version})


def test_publishing_brings_route_and_residents_to_redis_and_may_be_repeated(queue: Queue) -> None:
    endpoint = make_endpoint("chat")
    for _ in range(2):
        services.publish(name="chat", queue=queue)
    assert queue.read_route("chat") == route_of(endpoint.to_state())
    assert queue.read_desired() == residents_of([endpoint.to_state()])
    assert reload(endpoint).is_published


def test_the_relay_does_what_the_outbox_holds_once(queue: Queue) -> None:
    make_endpoint("chat")
    make_endpoint("search")
    assert services.relay(queue=queue, now=NOW) == 2
    assert services.relay(queue=queue, now=NOW) == 0
    assert queue.read_route("chat") is not None
    assert queue.read_route("search") is not None


def test_with_redis_away_nothing_is_forgotten(queue: Queue, absent_queue: Queue) -> None:
    endpoint = make_endpoint("chat")
    with pytest.raises(QueueUnavailable):
        services.relay(queue=absent_queue, now=NOW)
    assert not reload(endpoint).is_published
    assert services.relay(queue=queue, now=NOW) == 1
    assert reload(endpoint).is_published


def test_the_relay_publishes_the_newest_state_whatever_the_outbox_row_was_about(
    queue: Queue,
) -> None:
    endpoint = make_endpoint("chat", generation=5, queue_cap=9)
    services.relay(queue=queue, now=NOW)
    route = queue.read_route("chat")
    assert route is not None
    assert (route.generation, route.queue_cap) == (5, 9)
    assert reload(endpoint).published_generation == 5


def test_an_emptied_redis_is_full_again_after_one_reconciliation(queue: Queue) -> None:
    endpoint = make_endpoint("chat")
    services.publish(name="chat", queue=queue)
    queue._redis.flushdb()
    assert services.reconcile(queue=queue) == ["route:chat", "desired"]
    assert queue.read_route("chat") == route_of(endpoint.to_state())
    assert queue.read_desired() == residents_of([endpoint.to_state()])
    assert services.reconcile(queue=queue) == []


def test_reconciliation_repairs_a_wish_that_differs(queue: Queue) -> None:
    make_endpoint("chat")
    services.reconcile(queue=queue)
    queue.publish_desired([])
    assert services.reconcile(queue=queue) == ["desired"]


def test_a_database_that_went_back_in_time_does_not_overwrite_a_newer_route(queue: Queue) -> None:
    endpoint = make_endpoint("chat", generation=7)
    services.publish(name="chat", queue=queue)
    Endpoint.objects.filter(pk=endpoint.pk).update(generation=6, queue_cap=1)
    with pytest.raises(services.RouteRefused, match="newer generation"):
        services.publish(name="chat", queue=queue)
    assert services.reconcile(queue=queue) == []
    route = queue.read_route("chat")
    assert route is not None
    assert route.generation == 7


def test_a_refused_route_does_not_hold_up_the_others(queue: Queue) -> None:
    stale = make_endpoint("chat", generation=7)
    services.relay(queue=queue, now=NOW)
    Endpoint.objects.filter(pk=stale.pk).update(generation=6)
    Outbox.objects.update(done_at=None)
    make_endpoint("search")
    services.relay(queue=queue, now=NOW)
    assert queue.read_route("search") is not None
    assert [row.subject for row in Outbox.objects.waiting("route")] == ["endpoint:chat"]


def test_a_new_incarnation_begins_anew(queue: Queue) -> None:
    endpoint = make_endpoint("chat", generation=7)
    services.publish(name="chat", queue=queue)
    Endpoint.objects.filter(pk=endpoint.pk).update(generation=2, incarnation=uuid.uuid4())
    services.publish(name="chat", queue=queue)
    route = queue.read_route("chat")
    assert route is not None
    assert route.generation == 2


def test_readiness_names_the_slots_of_each_filled_role() -> None:
    live, candidate = make_version(), make_version()
    endpoint = make_endpoint("chat", live=live, candidate=candidate)
    slots = [
        SlotStatus("s1", "chat", "tiny/1", SlotState.READY),
        SlotStatus("s2", "chat", "tiny/2", SlotState.LOADING),
        SlotStatus("s3", "search", "tiny/2", SlotState.READY),
    ]
    roles = services.readiness(endpoint=endpoint, slots=slots)
    assert [(role.role, role.version, role.is_ready) for role in roles] == [
        ("live", "tiny/1", True),
        ("candidate", "tiny/2", False),
    ]
    assert [slot.slot for slot in roles[1].slots] == ["s2"]
