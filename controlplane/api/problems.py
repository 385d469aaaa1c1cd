"""Errors of /api/v1 as problem+json, and how the schema describes them and the token."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import InterfaceError, OperationalError
from django.http import Http404
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.views import exception_handler as drf_exception_handler

from controlplane.errors import DomainError

logger = logging.getLogger(__name__)

DATABASE_AWAY = (OperationalError, InterfaceError)
PROBLEM_JSON = "application/problem+json"
PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retryable"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "Stable; programs may match it."},
        "retryable": {
            "type": "boolean",
            "description": "Whether the same request may succeed later; false: change it first.",
        },
        "errors": {"type": "object", "description": "Messages by field."},
        "current": {
            "type": "object",
            "description": "The state that a refused change of an endpoint met.",
        },
        "missing": {"type": "string", "description": "What a version lacks to go live."},
        "fit": {
            "type": "object",
            "description": "What a version needs and what there is, where it cannot be loaded.",
        },
    },
}


class ControlTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """How the schema describes the token."""

    target_class = "controlplane.api.drf.ControlTokenAuthentication"
    name = "controlToken"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:  # noqa: ARG002 (the framework's signature)
        """A bearer token in the Authorization header."""
        return {"type": "http", "scheme": "bearer"}


def describe_problems(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Give every operation of the schema its error answer, which is the same everywhere."""
    result.setdefault("components", {}).setdefault("schemas", {})["Problem"] = PROBLEM_SCHEMA
    content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    answer = {"description": "An error, after RFC 9457.", "content": content}
    for operations in result["paths"].values():
        for operation in operations.values():
            operation["responses"]["default"] = answer
    return result


def to_problem(exception: Exception, context: dict[str, Any]) -> Response | None:
    """Any anticipated failure as problem+json; None lets an unforeseen one be a logged 500."""
    if isinstance(exception, DomainError):
        headers = {}
        if exception.retry_after_s is not None:
            headers["Retry-After"] = str(exception.retry_after_s)
        return _problem(
            int(exception.status),
            code=exception.code,
            detail=exception.message,
            retryable=not exception.permanent,
            headers=headers,
            members=exception.details,
        )
    if isinstance(exception, DATABASE_AWAY):
        logger.warning("database away error=%s", exception)
        return _problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            code="database_unavailable",
            detail="The database does not answer, so nothing was changed that it had not confirmed; try again.",
            retryable=True,
            headers={"Retry-After": "5"},
        )
    response = drf_exception_handler(exception, context)
    if response is None:
        return None
    code = _code_of(exception)
    headers = {
        name: response[name] for name in ("WWW-Authenticate", "Retry-After") if name in response
    }
    if isinstance(exception, exceptions.ValidationError):
        return _problem(
            response.status_code,
            code=code,
            detail="Some fields are not as they must be.",
            headers=headers,
            members={"errors": _by_field(response.data)},
        )
    return _problem(
        response.status_code,
        code=code,
        detail=str(response.data["detail"]),
        retryable=isinstance(exception, exceptions.Throttled),
        headers=headers,
    )


def _code_of(exception: Exception) -> str:
    if isinstance(exception, Http404):
        return "not_found"
    if isinstance(exception, PermissionDenied):
        return "permission_denied"
    return str(getattr(exception, "default_code", "error"))


def _by_field(errors: Any) -> dict[str, Any]:
    return errors if isinstance(errors, dict) else {"": errors}


def _problem(
    status: int,
    *,
    code: str,
    detail: str,
    headers: Mapping[str, str],
    retryable: bool = False,
    members: Mapping[str, Any] | None = None,
) -> Response:
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "retryable": retryable,
        **(members or {}),
    }
    return Response(body, status=status, headers=headers, content_type=PROBLEM_JSON)


class NoSuchResource(APIView):
    """Every other address under /api/v1: 401 without a token, else a 404 problem."""

    schema = None
    read_role = "viewer"
    write_role = "viewer"

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Whatever the method: first the token, then the answer."""
        super().initial(request, *args, **kwargs)
        raise Http404(f"There is no {request.path}; see /api/v1/schema.")
