"""The formats in which the clients of an API read errors: OpenAI's error object, or Anthropic's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen
from starlette.responses import JSONResponse

from adapters.http.wire.errors import ApiError


@frozen
class ErrorFormat:
    """The way in which the errors of one API are written.

    make_body: makes the JSON of an error and of the answer's id, which is None where there never was an answer.
    status_overrides: HTTP statuses that replace ours. id_headers: the headers from which the API's clients read an
    answer's id.
    """

    make_body: Callable[[ApiError, str | None], dict[str, Any]]
    status_overrides: Mapping[int, int] = field(factory=dict)
    id_headers: tuple[str, ...] = ("x-request-id",)

    def make_headers(self, id_: str) -> dict[str, str]:
        """Return the headers that carry an answer's id."""
        return dict.fromkeys(self.id_headers, id_)

    def make_response(self, error: ApiError, id_: str | None = None) -> JSONResponse:
        """Return the whole response for an error."""
        headers = {**error.headers, **({} if id_ is None else self.make_headers(id_))}
        return JSONResponse(self.make_body(error, id_), self.status_overrides.get(error.status, error.status), headers)


def make_openai_error(error: ApiError, _: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object. Its specification requires all four keys."""
    described = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**described, **error.extra}}


ANTHROPIC_TYPES = {  # by our status; any other 4xx is an invalid request, any other 5xx a failure
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def make_anthropic_error(error: ApiError, id_: str | None = None) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": write_anthropic_message(error)}, "request_id": id_}


def write_anthropic_message(error: ApiError) -> str:
    """Return the message of an error. Claude Code reads both counts of tokens out of Anthropic's own sentence, so it is
    used here.
    """
    if error.code == "context_length_exceeded":
        most = error.extra["n_ctx"]
        return f"prompt is too long: {max(error.extra['n_prompt_tokens'], most + 1)} tokens > {most} maximum"
    return error.message


OPENAI = ErrorFormat(make_openai_error)
ANTHROPIC = ErrorFormat(make_anthropic_error, {503: 529}, ("request-id", "x-request-id"))
