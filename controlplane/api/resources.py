"""What views of /api/v1 have in common: a query parameter that nobody reads is refused, not ignored."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.views import APIView

from controlplane.api.drf import PAGING, READ_METHODS


class Resource(APIView):
    """A view that knows its query parameters: the fields of ``query``, and those of pages where it has pages.

    A misspelt ``?outcom=`` that nobody reads would list everything, and look like an answer.
    """

    query: type[serializers.Serializer[Any]] | None = None
    is_paged = False

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """After token and role, and before anything is read or done.

        Raises:
            ValidationError: a parameter is unknown; each is named, and so are the known ones.
        """
        super().initial(request, *args, **kwargs)
        known = self._known_parameters(request)
        unknown = sorted(set(request.query_params) - set(known))
        if unknown:
            what = f"known are {', '.join(known)}" if known else "there are none here"
            raise serializers.ValidationError(
                {name: [f"There is no such query parameter; {what}."] for name in unknown}
            )

    def wanted(self) -> dict[str, Any]:
        """The values of ``query`` that were sent.

        Raises:
            ValidationError: one is not as it must be; each is named.
        """
        if self.query is None:
            return {}
        checked = self.query(data=self.request.query_params)
        checked.is_valid(raise_exception=True)
        values: dict[str, Any] = checked.validated_data
        return values

    def _known_parameters(self, request: Request) -> tuple[str, ...]:
        if request.method not in READ_METHODS:
            return ()
        narrowing = tuple(self.query().fields) if self.query else ()
        has_pages = self.is_paged or isinstance(self, ListModelMixin)
        return narrowing + (PAGING if has_pages else ())
