"""From an endpoint's state to its route and the residents that slots should hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.endpoints.routing import EndpointState, Placed, residents_of, route_of
from inference.protocol import Route

placed = st.sampled_from([Placed(f"tiny/{n}", f"/artifacts/{n}", {"n": n}) for n in range(1, 5)])
states = st.builds(
    EndpointState,
    name=st.sampled_from(["chat", "search", "code"]),
    incarnation=st.just("i"),
    generation=st.integers(1, 100),
    salt=st.just("s"),
    live=placed,
    previous=st.none() | placed,
    candidate=st.none() | placed,
    canary_bp=st.integers(0, 10_000),
    queue_cap=st.integers(1, 1000),
    deadline_s=st.floats(1, 600),
    store_texts=st.booleans(),
    retired=st.none() | placed,
)
fleets = st.lists(states, max_size=3, unique_by=lambda state: state.name)


def make_state(**fields: object) -> EndpointState:
    values: dict[str, object] = {
        "name": "chat",
        "incarnation": "i",
        "generation": 3,
        "salt": "s",
        "live": Placed("tiny/2", "/artifacts/2", {"dtype": "bfloat16"}),
        "previous": Placed("tiny/1", "/artifacts/1"),
        "candidate": None,
        "canary_bp": 0,
        "queue_cap": 7,
        "deadline_s": 30.0,
        "store_texts": False,
    }
    return EndpointState(**values | fields)  # type: ignore[arg-type]


def test_a_route_is_the_whole_state() -> None:
    assert route_of(make_state()) == Route(
        endpoint="chat",
        incarnation="i",
        generation=3,
        live="tiny/2",
        previous="tiny/1",
        candidate="",
        canary_bp=0,
        salt="s",
        queue_cap=7,
        deadline_s=30.0,
        store_texts=False,
    )


@given(states)
def test_a_route_survives_the_way_through_redis(state: EndpointState) -> None:
    route = route_of(state)
    assert Route.from_json(route.to_json()) == route


def test_live_versions_are_wanted_first_then_the_way_back_then_what_is_to_come() -> None:
    fleet = [
        make_state(name="b", candidate=Placed("tiny/3", "/artifacts/3")),
        make_state(name="a", previous=None, retired=Placed("tiny/1", "/artifacts/1")),
    ]
    assert [(each.endpoint, each.version, each.role) for each in residents_of(fleet)] == [
        ("a", "tiny/2", "live"),
        ("b", "tiny/2", "live"),
        ("b", "tiny/1", "previous"),
        ("b", "tiny/3", "candidate"),
        ("a", "tiny/1", "retired"),
    ]


def test_a_version_in_two_roles_is_held_for_the_more_wanted_one() -> None:
    state = make_state(candidate=Placed("tiny/1", "/artifacts/1"))
    assert [(each.version, each.role) for each in residents_of([state])] == [
        ("tiny/2", "live"),
        ("tiny/1", "previous"),
    ]


@given(fleets)
def test_each_version_of_an_endpoint_is_wanted_once(fleet: list[EndpointState]) -> None:
    residents = [(each.endpoint, each.version) for each in residents_of(fleet)]
    assert len(residents) == len(set(residents))
    assert set(residents) == {
        (state.name, role.name) for state in fleet for role in state.placed().values()
    }


@given(fleets)
def test_the_wish_does_not_depend_on_the_order_of_rows(fleet: list[EndpointState]) -> None:
    assert residents_of(fleet) == residents_of(list(reversed(fleet)))


def test_a_resident_brings_all_that_a_slot_needs() -> None:
    resident = residents_of([make_state(previous=None)])[0]
    assert resident.artifact == "/artifacts/2"
    assert resident.engine_options == {"dtype": "bfloat16"}
