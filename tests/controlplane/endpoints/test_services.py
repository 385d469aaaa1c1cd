"""Endpoints: one transaction in the database, then Redis, which may be away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, transaction

from controlplane.endpoints import moves, publication, services
from controlplane.endpoints.changes import Changed, UnknownEndpoint
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.moves import Settings
from controlplane.endpoints.routing import residents_of, route_of
from controlplane.events.models import Event, Outbox
from inference.queue import Queue
from tests.factories import NOW, hold_ready, make_endpoint, make_version

pytestmark = pytest.mark.django_db


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
        {"deadline_s": 3601.0},
        {"standby_s": 2_592_001},
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


def two_versions(queue: Queue, **fields: Any) -> Endpoint:
    """``chat`` with tiny/2 live, tiny/1 to go back to, and a slot for each."""
    first, second = make_version(), make_version()
    endpoint = make_endpoint("chat", live=second, previous=first, **fields)
    publication.publish(name="chat", queue=queue, now=NOW)
    hold_ready(queue, "chat", "tiny/1", "tiny/2")
    return endpoint


def promote(queue: Queue, version: str, **fields: Any) -> Changed:
    return services.promote(
        name="chat", version=version, actor="ada", reason="better", now=NOW, queue=queue, **fields
    )


def rollback(queue: Queue, **fields: Any) -> Changed:
    return services.rollback(name="chat", actor="ada", now=NOW, queue=queue, **fields)


def events_of(name: str) -> list[tuple[str, int]]:
    return [
        (event.type, event.data["generation"])
        for event in Event.objects.about(f"endpoint:{name}").in_order()
    ]


def test_a_promote_is_row_event_and_route_under_one_generation(queue: Queue) -> None:
    endpoint = two_versions(queue)
    make_version()
    hold_ready(queue, "chat", "tiny/3")
    done = promote(queue, "tiny/3")
    row = reload(endpoint)
    assert (row.live.name, row.previous and row.previous.name, row.generation) == (
        "tiny/3", "tiny/2", 2,
    )  # fmt: skip
    assert queue.read_route("chat") == route_of(row.to_state())
    assert queue.read_desired() == residents_of([row.to_state()])
    assert done.published is not None
    assert row.is_published
    assert done.applied_in_ms is not None
    assert 0 < done.applied_in_ms < 1000
    event = Event.objects.get(type="endpoint.promoted")
    assert (event.actor, event.reason) == ("ada", "better")
    assert event.data["was"] == {
        "generation": 1, "live": "tiny/2", "previous": "tiny/1", "retired": None,
    }  # fmt: skip
    assert event.outbox.topic == "route"


def test_a_version_that_no_slot_holds_is_refused_and_nothing_changes(queue: Queue) -> None:
    endpoint = two_versions(queue)
    make_version()
    with pytest.raises(moves.VersionNotResident, match="make it the candidate first"):
        promote(queue, "tiny/3")
    hold_ready(queue, "search", "tiny/3")
    with pytest.raises(moves.VersionNotResident):
        promote(queue, "tiny/3")
    assert reload(endpoint).generation == 1
    assert events_of("chat") == [("endpoint.created", 1)]


def test_a_promote_of_somebody_who_saw_another_state_is_refused_with_the_state(
    queue: Queue,
) -> None:
    two_versions(queue)
    with pytest.raises(moves.StaleGeneration) as caught:
        promote(queue, "tiny/1", expected_generation=7)
    assert caught.value.details["current"]["generation"] == 1
    assert promote(queue, "tiny/1", expected_generation=1).state.generation == 2


def test_without_redis_nobody_knows_what_could_go_live(queue: Queue, absent_queue: Queue) -> None:
    two_versions(queue)
    with pytest.raises(services.ReadinessUnknown) as caught:
        promote(absent_queue, "tiny/1")
    assert caught.value.retry_after_s


def test_a_rollback_rejects_what_it_leaves_and_a_repeat_changes_nothing(queue: Queue) -> None:
    endpoint = two_versions(queue)
    done = rollback(queue, from_version="tiny/2", reason="rude answers")
    again = rollback(queue, from_version="tiny/2")
    row = reload(endpoint)
    assert (done.is_changed, again.is_changed) == (True, False)
    assert (row.live.name, row.previous, row.retired and row.retired.name) == (
        "tiny/1", None, "tiny/2",
    )  # fmt: skip
    assert [(each.version.name, each.reason) for each in row.rejections.all()] == [
        ("tiny/2", "rude answers")
    ]
    assert events_of("chat") == [("endpoint.created", 1), ("endpoint.rolled_back", 2)]
    assert [each.role for each in queue.read_desired() or ()] == ["live", "retired"]


def test_a_rejected_version_is_promoted_by_naming_it_and_is_rejected_no_more(
    queue: Queue,
) -> None:
    endpoint = two_versions(queue)
    rollback(queue)
    promote(queue, "tiny/2")
    row = reload(endpoint)
    assert row.live.name == "tiny/2"
    assert not row.rejections.exists()


def test_a_rollback_is_committed_while_redis_is_away_and_published_later(
    queue: Queue, absent_queue: Queue
) -> None:
    endpoint = two_versions(queue)
    done = rollback(absent_queue)
    assert (done.is_changed, done.published, done.applied_in_ms) == (True, None, None)
    assert reload(endpoint).live.name == "tiny/1"
    assert not reload(endpoint).is_published
    assert publication.relay(queue=queue, now=NOW) > 0
    route = queue.read_route("chat")
    assert route is not None
    assert route.live == "tiny/1"


def test_a_repeat_publishes_what_the_first_could_not(queue: Queue, absent_queue: Queue) -> None:
    endpoint = two_versions(queue)
    rollback(absent_queue, from_version="tiny/2")
    again = rollback(queue, from_version="tiny/2")
    assert (again.is_changed, again.published is not None) == (False, True)
    assert reload(endpoint).is_published


def test_the_policy_for_requests_in_flight_goes_with_the_rollback_alone(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_versions(queue, in_flight="cut")
    told: list[str] = []
    apply_route = queue.apply_route

    def listen(route: Any, *, in_flight: str) -> Any:
        told.append(in_flight)
        return apply_route(route, in_flight=in_flight)

    monkeypatch.setattr(queue, "apply_route", listen)
    promote(queue, "tiny/1")
    rollback(queue)
    assert told == ["finish", "cut"]


def test_a_candidate_is_loaded_without_traffic_and_then_given_a_share(queue: Queue) -> None:
    endpoint = two_versions(queue)
    make_version()
    services.set_candidate(name="chat", version="tiny/3", actor="ada", now=NOW, queue=queue)
    row = reload(endpoint)
    assert (row.candidate and row.candidate.name, row.canary_bp) == ("tiny/3", 0)
    assert row.salt != endpoint.salt
    services.set_canary(name="chat", canary_bp=250, actor="ada", now=NOW, queue=queue)
    services.set_candidate(name="chat", version=None, actor="ada", now=NOW, queue=queue)
    assert (reload(endpoint).candidate, reload(endpoint).canary_bp) == (None, 0)
    assert [kind for kind, _ in events_of("chat")][1:] == [
        "endpoint.candidate_set", "endpoint.canary_set", "endpoint.candidate_set",
    ]  # fmt: skip


def test_settings_and_candidate_change_together_as_one_generation(queue: Queue) -> None:
    two_versions(queue)
    make_version()
    done = services.configure(
        name="chat",
        candidate="tiny/3",
        canary_bp=100,
        settings=Settings(queue_cap=9, in_flight="retry_if_no_token", standby_s=60),
        actor="ada",
        now=NOW,
        queue=queue,
    )
    assert (done.state.generation, done.state.queue_cap, done.state.canary_bp) == (2, 9, 100)
    event = Event.objects.get(type="endpoint.configured")
    assert event.data["settings"] == {
        "queue_cap": 9, "in_flight": "retry_if_no_token", "standby_s": 60,
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        Settings(queue_cap=0),
        Settings(deadline_s=0.5),
        Settings(in_flight="pray"),
        Settings(standby_s=0),
    ],
)
def test_a_setting_that_cannot_be_is_named(queue: Queue, settings: Settings) -> None:
    two_versions(queue)
    name = next(iter(settings.changes()))
    with pytest.raises(services.InvalidEndpoint, match=name):
        services.configure(name="chat", settings=settings, actor="ada", now=NOW, queue=queue)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda queue: promote(queue, "tiny/9"), services.UnknownVersion),
        (lambda queue: promote(queue, "nonsense"), services.UnknownVersion),
        (lambda queue: promote(queue, "slow/1"), services.VersionNotReady),
        (lambda queue: rollback(queue, to_version="tiny/9"), services.UnknownVersion),
    ],
)
def test_what_is_named_must_be_there(
    queue: Queue, call: Callable[[Queue], object], error: type[Exception]
) -> None:
    two_versions(queue)
    make_version(model="slow", state="pending")
    with pytest.raises(error):
        call(queue)


def test_an_endpoint_that_is_not_there_is_told(queue: Queue) -> None:
    make_version()
    with pytest.raises(UnknownEndpoint, match="'chat'"):
        rollback(queue)
    with pytest.raises(UnknownEndpoint, match="'chat'"):
        promote(queue, "tiny/1")


def test_a_standby_ends_once_and_the_version_is_wanted_no_more(queue: Queue) -> None:
    endpoint = two_versions(queue, standby_s=60)
    rollback(queue)
    assert services.expire_standby(queue=queue, now=NOW) == []
    later = NOW.replace(minute=1)
    assert services.expire_standby(queue=queue, now=later) == ["chat"]
    assert services.expire_standby(queue=queue, now=later) == []
    assert reload(endpoint).retired is None
    assert [each.version for each in queue.read_desired() or ()] == ["tiny/1"]
    assert reload(endpoint).rejections.count() == 1
    assert Event.objects.get(type="endpoint.standby_ended").reason == "the standby time is over"


def test_a_second_rollback_within_the_standby_time_tells_which_version_is_kept_no_more(
    queue: Queue,
) -> None:
    endpoint = two_versions(queue)
    rollback(queue)
    assert reload(endpoint).retired.name == "tiny/2"  # type: ignore[union-attr]
    assert not Event.objects.filter(type="endpoint.standby_ended").exists()
    make_version()
    rollback(queue, to_version="tiny/3", from_version="tiny/1", force=True)
    assert reload(endpoint).retired.name == "tiny/1"  # type: ignore[union-attr]
    event = Event.objects.get(type="endpoint.standby_ended")
    assert event.data == {"generation": 3, "version": "tiny/2"}
    assert event.reason == "tiny/1 was taken back as well, and one version is kept"
    assert Outbox.objects.count() == 3, "the change itself is what is to be carried out"


def test_a_standby_that_ends_by_being_named_again_is_no_loss(queue: Queue) -> None:
    two_versions(queue)
    rollback(queue)
    services.promote(
        name="chat", version="tiny/2", actor="ada", reason="good after all", now=NOW, queue=queue
    )
    assert not Event.objects.filter(type="endpoint.standby_ended").exists()


def test_the_reason_can_be_added_after_a_change_made_in_a_hurry(queue: Queue) -> None:
    two_versions(queue)
    rollback(queue)
    event = Event.objects.get(type="endpoint.rolled_back")
    services.annotate(name="chat", sequence=event.sequence, reason="it swore", actor="bob", now=NOW)
    note = Event.objects.get(type="endpoint.annotated")
    assert (note.reason, note.actor, note.data) == ("it swore", "bob", {"event": event.sequence})
    with pytest.raises(services.UnknownEvent):
        services.annotate(name="other", sequence=event.sequence, reason="x", actor="b", now=NOW)
