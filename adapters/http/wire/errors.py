"""The errors that a client can get. Each API writes them in its own format (`error_format.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field

from effects.ports import Closed
from effects.stream import Finish


@define(eq=False)
class ApiError(Exception):
    """An answer that is an error, in no API's format yet. `message` is a sentence that a user can act on."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None  # a path into the body: $.messages[2].role
    code: str | None = None
    extra: Mapping[str, Any] = field(factory=dict)
    headers: Mapping[str, str] = field(factory=dict)

    def add_headers(self, headers: Mapping[str, str]) -> ApiError:
        """Return the same error with further headers."""
        return evolve(self, headers={**self.headers, **headers})


# llama.cpp's type. Its clients know it, others the code (OpenAI's), and agents look for words of its message.
TOO_LONG = "exceed_context_size_error"
SHUTTING_DOWN = "The server is shutting down."
OUT_OF_REACH = "A part of the model is out of reach, so nothing can be answered now"


def unknown_path(path: str, known: Sequence[str]) -> ApiError:
    """Return the error for a path that is not served. Clients show a 404 as "there is no such model", so the message
    lists the paths.
    """
    message = f"There is no API at {path[:200]!r} on this server, whatever the model. It has {', '.join(known)}."
    return ApiError(404, message, code="unknown_path")


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    message = f"{method} is not possible on {path[:200]!r}; {allowed} is."
    return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def context_exceeded(tokens: int, context: int, param: str) -> ApiError:
    message = (
        f"The prompt has {tokens} tokens. With its answer, it exceeds the available context size ({context} tokens). "
        "Shorten the prompt, or start the server with a larger --max-ctx (and --kv-memory)."
    )
    counts = {"n_prompt_tokens": tokens, "n_ctx": context}
    return ApiError(400, message, TOO_LONG, param, code="context_length_exceeded", extra=counts)


def length_not_counted(least: int, context: int, param: str) -> ApiError:
    """Return the error for a prompt whose tokens were not counted to the end. least: how many there are at least; 0:
    unknown.
    """
    count = f"at least {least} tokens" if least else "too much text to count its tokens"
    error = context_exceeded(least, context, param)
    return evolve(error, message=error.message.replace(f"{least} tokens", count, 1))


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    names = f"{', '.join(map(repr, served))} {'is' if len(served) == 1 else 'are'}"
    message = f"The model {name[:200]!r} is not served here; {names} (--alias adds names, --any-model all)."
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


def shard_lost(outages: Mapping[str, str], detail: str, retry_after_s: int) -> ApiError:
    """Return the error for a part of the model that cannot be reached.

    outages: the lost parts, and why each is lost. detail: why the request has ended, for when the part is back already.
    """
    why = "; ".join(f"{whose}: {what}" for whose, what in outages.items()) or detail.removeprefix("RowsLost: ")
    error = unavailable(f"{OUT_OF_REACH}: {why}.", retry_after_s)
    return evolve(error, code="shard_lost")


def client_gone() -> ApiError:
    """Return the error for a client that has left. It is only seen in the log."""
    return ApiError(499, "The client has left.", "cancelled", code="client_gone")


# How answers end badly while the server goes on: status, message, type, code, and whether to try again.
FAILURES: Mapping[Finish, tuple[int, str, str, str, bool]] = {
    "deadline": (
        504,
        "The request took longer than this server allows (--request-timeout).",
        "timeout_error",
        "deadline_exceeded",
        False,  # it would most likely take as long again
    ),
    "cancelled": (499, "The request was cancelled.", "cancelled", "cancelled", True),
    "dead_end": (
        422,
        "No token can continue the answer in the requested form, or the form is too large to be followed.",
        "invalid_request_error",
        "form_dead_end",
        False,
    ),
    "too_long": (
        400,
        "The prompt exceeds the available context size, and not enough of it could be left out (see --max-ctx).",
        TOO_LONG,
        "context_length_exceeded",
        False,
    ),
    "uncompressed": (
        503,
        "The prompt fits this server's context only once it is compressed, and the drafter has failed.",
        "unavailable_error",
        "drafter_failed",
        True,
    ),
    "failed": (
        500,
        "The engine could not finish this request. The server's log says why.",
        "server_error",
        "engine_failed",
        True,
    ),
}


def find_failure(closed: Closed, retry_after_s: int, outages: Mapping[str, str] | None = None) -> ApiError | None:
    """Return the error that the end of a job is to its client, or None if it ended well. Details are for the log only.

    outages: as `Status` has them now.
    """
    if closed.finish in {"stop", "length"}:
        return None
    if closed.finish == "queue_full":
        return queue_full(retry_after_s)
    if closed.finish == "shutdown":
        return unavailable(SHUTTING_DOWN, retry_after_s)
    if closed.finish == "lost":
        return shard_lost(outages or {}, closed.detail, retry_after_s)
    status, message, kind, code, again = FAILURES[closed.finish]
    compression = closed.report.compression
    counts = {} if closed.finish != "too_long" or compression is None else {"n_prompt_tokens": compression.original}
    headers = {} if again else {"x-should-retry": "false"}
    return ApiError(status, message, kind, code=code, extra=counts, headers=headers)
