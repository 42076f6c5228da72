"""How the clients of an API hear that something went wrong: OpenAI's error object, or Anthropic's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen
from starlette.responses import JSONResponse

from adapters.http.wire.errors import ApiError


@frozen
class Dialect:
    """One way of saying it. `id` is the answer's, and None where there never was one.

    statuses: what is said instead of another status.  id_headers: what its clients read an answer's id from.
    """

    body: Callable[[ApiError, str | None], dict[str, Any]]
    statuses: Mapping[int, int] = field(factory=dict)
    id_headers: tuple[str, ...] = ("x-request-id",)

    def headers(self, id_: str) -> dict[str, str]:
        return dict.fromkeys(self.id_headers, id_)

    def response(self, error: ApiError, id_: str | None = None) -> JSONResponse:
        headers = {**error.headers, **({} if id_ is None else self.headers(id_))}
        return JSONResponse(self.body(error, id_), self.statuses.get(error.status, error.status), headers)


def openai_error(error: ApiError, _: str | None = None) -> dict[str, Any]:
    """All four keys are required by OpenAI's specification."""
    described = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**described, **error.extra}}


ANTHROPIC_TYPES = {  # by our status; 4xx that are not here are invalid requests, 5xx failures of the API
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError, id_: str | None = None) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": anthropic_words(error)}, "request_id": id_}


def anthropic_words(error: ApiError) -> str:
    """Claude Code reads both counts out of the sentence, which must be Anthropic's own."""
    if error.code == "context_length_exceeded":
        most = error.extra["n_ctx"]
        return f"prompt is too long: {max(error.extra['n_prompt_tokens'], most + 1)} tokens > {most} maximum"
    return error.message


OPENAI = Dialect(openai_error)
ANTHROPIC = Dialect(anthropic_error, {503: 529}, ("request-id", "x-request-id"))
