"""A typed client of the control API and of one completion; HTTP only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

TIMEOUT = httpx.Timeout(30.0, connect=3.0)
# The first completion of a cold machine may take its time.
COMPLETION_TIMEOUT = httpx.Timeout(120.0, connect=3.0)


class ApiError(Exception):
    """The server's answer was an error, or there was none; ``status`` 0 means that nobody answered."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A line of versions."""

    name: str
    description: str


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """A version, as a table shows it."""

    name: str
    state: str
    state_reason: str
    dtype: str
    quantization: str
    context_length: int | None
    num_parameters: int | None
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One engine slot: where it is on the way to ready, and what computes there, once that is known."""

    slot: str
    state: str
    detail: str
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class RoleInfo:
    """A role of an endpoint."""

    role: str
    version: str
    is_ready: bool
    slots: tuple[SlotInfo, ...]


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """An endpoint; ``roles`` is None when the control process cannot ask Redis."""

    name: str
    generation: int
    is_published: bool
    canary_bp: int
    roles: tuple[RoleInfo, ...] | None


@dataclass(frozen=True, slots=True)
class MoveInfo:
    """What became of a promote or a rollback; the counts are None while Redis is away."""

    generation: int
    live: str
    previous: str | None
    changed: bool
    published: bool
    requeued: int | None
    in_flight: int | None
    applied_in_ms: float | None


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step of a rollout; index -1 is the time until the candidate is ready."""

    index: int
    title: str
    phase: str
    share: float


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """A rollout, as the command line tells it."""

    id: str
    endpoint: str
    candidate: str
    state: str
    is_active: bool
    step_index: int
    canary_bp: int
    verdict: str
    why: str
    steps: tuple[StepInfo, ...]


@dataclass(frozen=True, slots=True)
class GateInfo:
    """What one gate says of one segment."""

    verdict: str
    sentence: str


class ControlClient:
    """The control API behind one token."""

    def __init__(
        self, url: str, token: str, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT,
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> list[ModelInfo]:
        """Every model."""
        return [
            ModelInfo(name=row["name"], description=row["description"])
            for row in self._rows("/api/v1/models")
        ]

    def versions(self, *, model: str = "") -> list[VersionInfo]:
        """Versions, the newest first; of one model where it is named."""
        names = VersionInfo.__dataclass_fields__
        parameters = {"model": model} if model else {}
        return [
            VersionInfo(**{name: row[name] for name in names})
            for row in self._rows("/api/v1/versions", parameters)
        ]

    def endpoints(self) -> list[EndpointInfo]:
        """Every endpoint."""
        return [_endpoint(row) for row in self._rows("/api/v1/endpoints")]

    def endpoint(self, name: str) -> EndpointInfo:
        """One endpoint."""
        return _endpoint(_send(self._http, "GET", f"/api/v1/endpoints/{name}"))

    def promote(
        self, endpoint: str, version: str, *, reason: str, expected_generation: int | None = None
    ) -> MoveInfo:
        """Make a version live."""
        body = {"version": version, "reason": reason, "expected_generation": expected_generation}
        return self._move(endpoint, "promote", body)

    def rollback(
        self,
        endpoint: str,
        *,
        leave: str | None = None,
        to: str | None = None,
        reason: str = "",
        force: bool = False,
    ) -> MoveInfo:
        """Take a version back: the live one, unless ``leave`` names it."""
        body = {"from": leave, "to": to, "reason": reason, "force": force}
        return self._move(endpoint, "rollback", body)

    def set_candidate(
        self, endpoint: str, version: str | None, *, canary_bp: int | None = None, reason: str = ""
    ) -> EndpointInfo:
        """Let slots load a version beside the live one; None lets the candidate go."""
        body: dict[str, Any] = {"candidate": version, "reason": reason}
        if canary_bp is not None:
            body |= {"canary_bp": canary_bp}
        return _endpoint(_send(self._http, "PATCH", f"/api/v1/endpoints/{endpoint}", json=body))

    def start_rollout(
        self, endpoint: str, version: str, *, policy: str, reason: str, takes_rejected: bool = False
    ) -> RolloutInfo:
        """Let a version earn its traffic on an endpoint."""
        body = {
            "endpoint": endpoint,
            "candidate": version,
            "policy": policy,
            "reason": reason,
            "takes_rejected": takes_rejected,
        }
        return _rollout(_send(self._http, "POST", "/api/v1/rollouts", json=body))

    def rollout(self, name: str) -> RolloutInfo:
        """The rollout with this id, or the newest one of the endpoint of this name."""
        try:
            return _rollout(_send(self._http, "GET", f"/api/v1/rollouts/{quote(name, safe='')}"))
        except ApiError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
        query = {"endpoint": name, "page_size": "1"}
        found = _send(self._http, "GET", "/api/v1/rollouts", params=query)["results"]
        if not found:
            raise ApiError(
                404, f"There is no rollout {name!r}, and none on an endpoint of that name."
            )
        return _rollout(_send(self._http, "GET", f"/api/v1/rollouts/{found[0]['id']}"))

    def gates(self, rollout: str) -> list[GateInfo]:
        """What each gate says of each segment, the worst first."""
        rows = self._rows(f"/api/v1/rollouts/{rollout}/segments")
        return [GateInfo(row["verdict"], row["sentence"]) for row in rows]

    def move_rollout(self, rollout: str, action: str, body: Mapping[str, Any]) -> RolloutInfo:
        """Do something to a rollout."""
        return _rollout(
            _send(self._http, "POST", f"/api/v1/rollouts/{rollout}/{action}", json=dict(body))
        )

    def _move(self, endpoint: str, move: str, body: Mapping[str, Any]) -> MoveInfo:
        sent = {name: value for name, value in body.items() if value is not None}
        row = _send(self._http, "POST", f"/api/v1/endpoints/{endpoint}/{move}", json=sent)
        return MoveInfo(**{name: row[name] for name in MoveInfo.__dataclass_fields__})

    def _rows(self, path: str, parameters: Mapping[str, str] | None = None) -> Iterator[Any]:
        page = _send(self._http, "GET", path, params=parameters)
        while True:
            yield from page["results"]
            if not page["next"]:
                return
            page = _send(self._http, "GET", page["next"])


def complete(
    url: str, key: str, endpoint: str, *, transport: httpx.BaseTransport | None = None
) -> str:
    """The text of one short chat completion through the gateway, once that says it is ready.

    Asking a gateway that is not would only fill the request log with refusals.
    """
    with httpx.Client(base_url=url, timeout=COMPLETION_TIMEOUT, transport=transport) as http:
        try:
            _send(http, "GET", "/readyz")
        except ApiError as error:
            raise ApiError(error.status, "the gateway is not ready yet") from error
        reply = _send(
            http,
            "POST",
            "/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={
                "model": endpoint,
                "messages": [{"role": "user", "content": "Say hello."}],
                "max_tokens": 8,
                "temperature": 0,
            },
        )
    return str(reply["choices"][0]["message"]["content"])


def _endpoint(row: Mapping[str, Any]) -> EndpointInfo:
    roles = row["roles"]
    return EndpointInfo(
        name=row["name"],
        generation=row["generation"],
        is_published=row["is_published"],
        canary_bp=row["canary_bp"],
        roles=None if roles is None else tuple(_role(role) for role in roles),
    )


def _rollout(row: Mapping[str, Any]) -> RolloutInfo:
    plain = [name for name in RolloutInfo.__dataclass_fields__ if name != "steps"]
    names = StepInfo.__dataclass_fields__
    steps = tuple(StepInfo(**{name: step[name] for name in names}) for step in row["steps"])
    return RolloutInfo(**{name: row[name] for name in plain}, steps=steps)


def _role(row: Mapping[str, Any]) -> RoleInfo:
    slots = tuple(
        SlotInfo(slot["slot"], slot["state"], slot["detail"], slot.get("kernel", ""))
        for slot in row["slots"]
    )
    return RoleInfo(row["role"], row["version"], row["is_ready"], slots)


def _send(http: httpx.Client, method: str, path: str, **options: Any) -> Any:
    try:
        response = http.request(method, path, **options)
        if response.is_success:
            return response.json()
    except httpx.HTTPError as error:
        raise ApiError(0, f"{http.base_url.join(path)}: {error}") from error
    except ValueError as error:
        raise ApiError(0, f"{http.base_url.join(path)} did not answer with JSON.") from error
    raise ApiError(response.status_code, f"{response.status_code} {_message_of(response)}")


def _message_of(response: httpx.Response) -> str:
    """What problem+json or an OpenAI-style error says."""
    try:
        body = response.json()
    except ValueError:
        return response.reason_phrase
    if isinstance(body, dict):
        error = body.get("error")
        if isinstance(error, dict):
            return str(error.get("message", response.reason_phrase))
        return str(body.get("detail", response.reason_phrase))
    return response.reason_phrase
