"""Everything that a client can be told went wrong, and how OpenAI's clients expect to hear it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field
from starlette.responses import JSONResponse

from effects.ports import Closed


@define(eq=False)
class ApiError(Exception):
    """An answer that is an error, in no dialect yet. `message` is a sentence that a user can act on."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None  # a path into the body: $.messages[2].role
    code: str | None = None
    extra: Mapping[str, Any] = field(factory=dict)
    headers: Mapping[str, str] = field(factory=dict)


def openai_error(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object; all four keys are required by its specification."""
    described = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**described, **error.extra}}


def openai_response(error: ApiError) -> JSONResponse:
    return JSONResponse(openai_error(error), error.status, dict(error.headers))


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def context_exceeded(tokens: int, context: int, param: str) -> ApiError:
    message = (
        f"The prompt has {tokens} tokens, but this server's context holds {context}, the answer included. "
        "Shorten the prompt, or start the server with a larger --max-ctx."
    )
    counts = {"n_prompt_tokens": tokens, "n_ctx": context}
    return ApiError(400, message, param=param, code="context_length_exceeded", extra=counts)


def model_not_found(asked: str, served: str) -> ApiError:
    message = f"The model {asked[:200]!r} is not served here; {served!r} is."
    return ApiError(404, message, param="$.model", code="model_not_found")


def queue_full(retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        "The server's queue is full. Try again in a moment.",
        "rate_limit_error",
        code="queue_full",
        headers={"retry-after": str(retry_after_s)},
    )


def unavailable(why: str, retry_after_s: int) -> ApiError:
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(503, why, "unavailable_error", code="unavailable", headers=headers)


def failure_of(closed: Closed, retry_after_s: int) -> ApiError | None:
    """What the end of a job means to its client; None for the good ends. Details are for the log only."""
    match closed.finish:
        case "stop" | "length":
            return None
        case "queue_full":
            return queue_full(retry_after_s)
        case "deadline":
            # the same request would most likely take as long again
            no_retry = {"x-should-retry": "false"}
            message = "The request took longer than this server allows (--request-timeout)."
            return ApiError(504, message, "timeout_error", code="deadline_exceeded", headers=no_retry)
        case "shutdown":
            return unavailable("The server is shutting down.", retry_after_s)
        case "cancelled":
            return ApiError(499, "The request was cancelled.", "cancelled", code="cancelled")
        case "failed":
            message = "The engine could not finish this request. The server's log says why."
            return ApiError(500, message, "server_error", code="engine_failed")
