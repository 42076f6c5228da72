"""All APIs for generating text, and which of them a request is for, even one that never reaches its handler."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from adapters.http.answer.access_log import NOTE, refused
from adapters.http.apis.anthropic_messages import MESSAGE_TOKENS, MESSAGES
from adapters.http.apis.llamacpp import LLAMACPP
from adapters.http.apis.openai_chat import CHAT, CHAT_TOKENS
from adapters.http.apis.openai_completions import COMPLETIONS
from adapters.http.apis.openai_responses import PATH as RESPONSES
from adapters.http.wire.error_format import ANTHROPIC, OPENAI, Dialect
from adapters.http.wire.errors import ApiError
from adapters.http.wire.paths import canonical

TEMPLATE = "/apply-template"
# responses are kept for whoever asked for them: see kept_responses.py
STATELESS = (CHAT, COMPLETIONS, MESSAGES, LLAMACPP)
COUNTERS = (CHAT_TOKENS, MESSAGE_TOKENS)
PATHS = frozenset(api.path for api in STATELESS)
CONVERSATIONS = frozenset({CHAT.path, CHAT_TOKENS.path, MESSAGES.path, MESSAGE_TOKENS.path, RESPONSES, TEMPLATE})


def refers(path: str) -> bool:
    """May a request mean something that was said before, or leave it? path: as it is known."""
    return path in CONVERSATIONS or path.startswith(f"{RESPONSES}/")


def dialect_of(scope: Scope) -> Dialect:
    """The API's own, also of what lies below its path; elsewhere Anthropic's clients are known by their header."""
    path = canonical(scope["path"], PATHS)
    for api in STATELESS:
        if path == api.path or path.startswith(f"{api.path}/"):
            return api.dialect
    return ANTHROPIC if "anthropic-version" in Headers(scope=scope) else OPENAI


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """Of a request that has no answer."""
    return dialect_of(scope).response(error)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    request.scope[NOTE] = refused(error)
    return error_response(request.scope, error)
