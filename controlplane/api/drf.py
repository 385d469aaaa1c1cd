"""What every resource of /api/v1 shares: bearer tokens, roles, fields, pages.

The framework reads this module while it defines its views, so nothing here imports a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from django.db.models import Model, QuerySet
from django.utils import timezone
from rest_framework import exceptions, serializers
from rest_framework.authentication import BaseAuthentication
from rest_framework.pagination import CursorPagination
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from controlplane.access.models import ApiKey
from controlplane.access.services import InvalidToken, authenticate_control

if TYPE_CHECKING:
    from rest_framework.views import APIView

PAGE_SIZE, MAX_PAGE_SIZE = 50, 500
PAGING = ("cursor", "page_size")
READ_METHODS = ("GET", "HEAD", "OPTIONS")


class ControlTokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer <control token>``; ``request.auth`` is the key, and there is no user."""

    def authenticate(self, request: Request) -> tuple[None, ApiKey] | None:
        """The key of the token, or None when no bearer token was sent."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        try:
            return None, authenticate_control(token=token.strip(), now=timezone.now())
        except InvalidToken as error:
            raise exceptions.AuthenticationFailed(error.message) from error

    def authenticate_header(self, request: Request) -> str:  # noqa: ARG002 (the framework's signature)
        """What a 401 asks for."""
        return 'Bearer realm="tatkal"'


class HasRole(BasePermission):
    """Whether the token's role reaches what the view asks for.

    Reading needs ``view.read_role``, everything else ``view.write_role``; a view that names neither is closed.
    """

    message = "The role of this token does not allow that."

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Deny by default."""
        name = "read_role" if request.method in READ_METHODS else "write_role"
        required = getattr(view, name, None)
        return (
            isinstance(request.auth, ApiKey)
            and required is not None
            and request.auth.has_role(required)
        )


class Body(serializers.Serializer[Any]):
    """The body of a request: a field that it does not know is refused, not ignored.

    A misspelt ``expected_generation`` that nobody reads would be a promise that nobody keeps.
    """

    def to_internal_value(self, data: Any) -> Any:
        """The values of the declared fields.

        Raises:
            ValidationError: a field is unknown, missing, or not as it must be; each is named.
        """
        unknown = sorted(set(data) - set(self.fields)) if isinstance(data, Mapping) else []
        if unknown:
            known = ", ".join(self.fields)
            raise serializers.ValidationError(
                {name: [f"There is no such field here; known are {known}."] for name in unknown}
            )
        return super().to_internal_value(data)


def caller_of(request: Request) -> ApiKey:
    """The token that asks; permissions were checked."""
    return cast(ApiKey, request.auth)


def actor_of(request: Request) -> str:
    """Who asks, as events name them: the token's name and id."""
    return str(caller_of(request))


def page_size_of(request: Request) -> int:
    """How many rows of a list were asked for.

    Raises:
        ValidationError: that is no number of rows that one page can have.
    """
    text = request.query_params.get("page_size", str(PAGE_SIZE))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_PAGE_SIZE):
        told = f"page_size={text[:20]!r} must be from 1 to {MAX_PAGE_SIZE}."
        raise serializers.ValidationError({"page_size": [told]})
    return int(text)


class Pages(CursorPagination):
    """Pages that stay put while rows are added; ``view.ordering`` must end in a unique column."""

    page_size = PAGE_SIZE
    max_page_size = MAX_PAGE_SIZE
    cursor_query_param, page_size_query_param = PAGING

    def get_page_size(self, request: Request) -> int:
        """As asked for, or a 400."""
        return page_size_of(request)

    def get_ordering(
        self,
        request: Request,  # noqa: ARG002 (the framework's signature)
        queryset: QuerySet[Model],  # noqa: ARG002
        view: Any,
    ) -> tuple[str, ...]:
        """The order of the view."""
        ordering: tuple[str, ...] = view.ordering
        return ordering
