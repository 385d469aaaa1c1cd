"""Redis is brought to what the database says, whatever was lost, late, emptied, or restored from a backup."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from controlplane.endpoints import publication
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.routing import residents_of, route_of
from controlplane.events.models import Event, Outbox
from inference.queue import Queue, QueueUnavailable
from tests.factories import NOW, make_endpoint, make_version

pytestmark = pytest.mark.django_db


def reload(endpoint: Endpoint) -> Endpoint:
    return Endpoint.objects.with_versions().get(pk=endpoint.pk)


def test_publishing_brings_route_and_residents_to_redis_and_may_be_repeated(queue: Queue) -> None:
    endpoint = make_endpoint("chat")
    for _ in range(2):
        publication.publish(name="chat", queue=queue, now=NOW)
    assert queue.read_route("chat") == route_of(endpoint.to_state())
    assert queue.read_desired() == residents_of([endpoint.to_state()])
    assert reload(endpoint).is_published


def test_the_relay_does_what_the_outbox_holds_once(queue: Queue) -> None:
    make_endpoint("chat")
    make_endpoint("search")
    assert publication.relay(queue=queue, now=NOW) == 2
    assert publication.relay(queue=queue, now=NOW) == 0
    assert queue.read_route("chat") is not None
    assert queue.read_route("search") is not None


def test_with_redis_away_nothing_is_forgotten(queue: Queue, absent_queue: Queue) -> None:
    endpoint = make_endpoint("chat")
    with pytest.raises(QueueUnavailable):
        publication.relay(queue=absent_queue, now=NOW)
    assert not reload(endpoint).is_published
    assert publication.relay(queue=queue, now=NOW) == 1
    assert reload(endpoint).is_published


def test_the_relay_publishes_the_newest_state_whatever_the_outbox_row_was_about(
    queue: Queue,
) -> None:
    endpoint = make_endpoint("chat", generation=5, queue_cap=9)
    publication.relay(queue=queue, now=NOW)
    route = queue.read_route("chat")
    assert route is not None
    assert (route.generation, route.queue_cap) == (5, 9)
    assert reload(endpoint).published_generation == 5


def test_an_emptied_redis_is_full_again_after_one_reconciliation(queue: Queue) -> None:
    endpoint = make_endpoint("chat")
    publication.publish(name="chat", queue=queue, now=NOW)
    queue._redis.flushdb()
    assert publication.reconcile(queue=queue, now=NOW) == ["route:chat", "desired"]
    assert queue.read_route("chat") == route_of(endpoint.to_state())
    assert queue.read_desired() == residents_of([endpoint.to_state()])
    assert publication.reconcile(queue=queue, now=NOW) == []


def test_a_route_whose_endpoint_the_database_lacks_is_withdrawn(queue: Queue) -> None:
    make_endpoint("chat")
    lost = make_endpoint("search")
    for name in ("chat", "search"):
        publication.publish(name=name, queue=queue, now=NOW)
    lost.delete()
    assert publication.reconcile(queue=queue, now=NOW) == ["withdrawn:search", "desired"]
    assert queue.read_endpoints() == ["chat"]
    assert queue.read_route("search") is None
    assert publication.reconcile(queue=queue, now=NOW) == []


def test_reconciliation_repairs_a_wish_that_differs(queue: Queue) -> None:
    make_endpoint("chat")
    publication.reconcile(queue=queue, now=NOW)
    queue.publish_desired([])
    assert publication.reconcile(queue=queue, now=NOW) == ["desired"]


def go_back_in_time(endpoint: Endpoint, queue: Queue) -> None:
    """Redis serves generation 7 of a route, and the database was restored from when it was at 5."""
    Endpoint.objects.filter(pk=endpoint.pk).update(generation=7, queue_cap=9)
    publication.publish(name=endpoint.name, queue=queue, now=NOW)
    Endpoint.objects.filter(pk=endpoint.pk).update(
        generation=5, published_generation=5, queue_cap=8
    )


def test_a_database_that_went_back_in_time_has_the_last_word_under_a_new_incarnation(
    queue: Queue,
) -> None:
    endpoint = make_endpoint("chat")
    go_back_in_time(endpoint, queue)
    assert publication.reconcile(queue=queue, now=NOW) == ["route:chat"]
    row, route = reload(endpoint), queue.read_route("chat")
    assert row.incarnation != endpoint.incarnation
    assert route == route_of(row.to_state())
    assert (row.generation, row.queue_cap, row.is_published) == (8, 8, True)
    event = Event.objects.get(type="endpoint.incarnation_changed")
    assert event.data == {"generation": 8, "database": 5, "redis": 7}
    assert publication.reconcile(queue=queue, now=NOW) == []


def test_a_change_after_the_database_went_back_heals_it_at_once(queue: Queue) -> None:
    endpoint = make_endpoint("chat")
    go_back_in_time(endpoint, queue)
    published = publication.publish(name="chat", queue=queue, now=NOW)
    assert published.generation == 8
    assert reload(endpoint).incarnation != endpoint.incarnation


def test_a_faster_change_is_no_step_back_in_time(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = make_endpoint("chat")
    apply_route = queue.apply_route

    def be_slow(route: object, **options: str) -> object:
        """Somebody commits and applies generation 2 while we are about to apply 1."""
        monkeypatch.setattr(queue, "apply_route", apply_route)
        Endpoint.objects.filter(pk=endpoint.pk).update(generation=2)
        apply_route(replace(route_of(endpoint.to_state()), generation=2))
        return apply_route(route, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(queue, "apply_route", be_slow)
    assert publication.publish(name="chat", queue=queue, now=NOW).generation == 2
    assert reload(endpoint).incarnation == endpoint.incarnation


def test_an_older_wish_that_overtakes_is_corrected_by_who_sees_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = make_endpoint("chat")
    candidate = make_version()
    publish_desired = queue.publish_desired

    def be_slow(residents: object) -> None:
        """Somebody adds a candidate while we are about to publish the wish without it."""
        monkeypatch.setattr(queue, "publish_desired", publish_desired)
        Endpoint.objects.filter(pk=endpoint.pk).update(candidate=candidate)
        publish_desired(residents)  # type: ignore[arg-type]

    monkeypatch.setattr(queue, "publish_desired", be_slow)
    publication.publish(name="chat", queue=queue, now=NOW)
    assert [each.version for each in queue.read_desired() or ()] == ["tiny/1", "tiny/2"]


def test_a_route_that_stays_refused_does_not_hold_up_the_others(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_endpoint("chat")
    make_endpoint("search")
    apply_newest = publication._apply_newest

    def refuse_chat(name: str, *rest: object) -> object:
        if name == "chat":
            raise publication.RouteRefused("faster than light")
        return apply_newest(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(publication, "_apply_newest", refuse_chat)
    assert publication.relay(queue=queue, now=NOW) == 1
    assert queue.read_route("search") is not None
    assert [row.subject for row in Outbox.objects.waiting("route")] == ["endpoint:chat"]
    assert publication.reconcile(queue=queue, now=NOW) == []


def test_a_new_incarnation_begins_anew(queue: Queue) -> None:
    endpoint = make_endpoint("chat", generation=7)
    publication.publish(name="chat", queue=queue, now=NOW)
    Endpoint.objects.filter(pk=endpoint.pk).update(generation=2, incarnation=uuid.uuid4())
    publication.publish(name="chat", queue=queue, now=NOW)
    route = queue.read_route("chat")
    assert route is not None
    assert route.generation == 2
