"""``Idempotency-Key`` for views: a repeat is given the first answer, with a header that says so."""

from __future__ import annotations

from typing import Any

from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access import idempotency
from controlplane.access.idempotency import Begun
from controlplane.api.drf import READ_METHODS, caller_of
from controlplane.api.resources import Resource

REPLAYED_HEADER = "Idempotent-Replayed"
IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    str,
    location=OpenApiParameter.HEADER,
    description="Names this request for 24 hours: sent again with the same body it is answered again, with the header "
    "Idempotent-Replayed, and not carried out again. Another body under the key is 422.",
)


class _Answered(Exception):
    """The request was answered before; carries the answer out of ``initial``."""

    def __init__(self, begun: Begun) -> None:
        super().__init__()
        self.begun = begun


class Idempotent(Resource):
    """A view that honours ``Idempotency-Key`` where one is sent with a change.

    Answers of success are kept. A refusal changed nothing, so its key is free: what was refused for a reason that
    passes may be sent again as it is.
    """

    _begun: Begun | None = None

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """After token and role, and before anything is done."""
        super().initial(request, *args, **kwargs)
        key = request.headers.get("Idempotency-Key")
        if key is None or request.method in READ_METHODS:
            return
        digest = idempotency.digest_request(
            request.method or "", request.get_full_path(), request.data
        )
        begun = idempotency.begin(
            caller=caller_of(request), key=key, digest=digest, now=timezone.now()
        )
        if begun.is_answered:
            raise _Answered(begun)
        self._begun = begun

    def handle_exception(self, exc: Exception) -> Response:
        """A repeat's answer is none of the errors."""
        if isinstance(exc, _Answered):
            row = exc.begun.row
            headers = {REPLAYED_HEADER: "true"} | (
                {"Location": row.location} if row.location else {}
            )
            return Response(row.answer, status=row.status, headers=headers)
        try:
            return super().handle_exception(exc)
        except BaseException:
            # Not foreseen, a logged 500: whether it did something is unknown, trying again will tell.
            self._let_go()
            raise

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the answer before it is sent."""
        if self._begun is not None and 200 <= response.status_code < 300:
            idempotency.keep(
                begun=self._begun,
                status=response.status_code,
                answer=response.data,
                location=response.headers.get("Location", ""),
            )
            self._begun = None
        self._let_go()
        return super().finalize_response(request, response, *args, **kwargs)

    def _let_go(self) -> None:
        if self._begun is not None:
            idempotency.drop(begun=self._begun)
            self._begun = None
