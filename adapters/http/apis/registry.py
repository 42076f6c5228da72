"""All APIs for generating text, and the API that a request is for, even if it never reaches a handler."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from adapters.http.apis.anthropic_messages import MESSAGE_TOKENS, MESSAGES
from adapters.http.apis.api import Api
from adapters.http.apis.llamacpp import LLAMACPP
from adapters.http.apis.openai_chat import CHAT, CHAT_TOKENS
from adapters.http.apis.openai_completions import COMPLETIONS
from adapters.http.apis.openai_responses import PATH as RESPONSES
from adapters.http.wire.error_format import ANTHROPIC, OPENAI, ErrorFormat
from adapters.http.wire.errors import ApiError
from adapters.http.wire.paths import canonical_path

TEMPLATE = "/apply-template"
# Responses are stored for each caller: see openai_stored_responses.py.
STATELESS: tuple[Api[Any], ...] = (CHAT, COMPLETIONS, MESSAGES, LLAMACPP)
COUNTERS = (CHAT_TOKENS, MESSAGE_TOKENS)
PATHS = frozenset(api.path for api in STATELESS)
CONVERSATIONS = frozenset({CHAT.path, CHAT_TOKENS.path, MESSAGES.path, MESSAGE_TOKENS.path, RESPONSES, TEMPLATE})


def needs_history(path: str) -> bool:
    """Return whether a request for this path may refer to earlier conversations, or add to them."""
    return path in CONVERSATIONS or path.startswith(f"{RESPONSES}/")


def find_error_format(scope: Scope) -> ErrorFormat:
    """Return the format of an API's errors, also below its path. On other paths, Anthropic's clients are known by their
    header.
    """
    path = canonical_path(scope["path"], PATHS)
    for api in STATELESS:
        if path == api.path or path.startswith(f"{api.path}/"):
            return api.error_format
    return ANTHROPIC if "anthropic-version" in Headers(scope=scope) else OPENAI


def make_error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """Return the response to a request that has no answer."""
    return find_error_format(scope).make_response(error)
