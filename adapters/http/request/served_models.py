"""What is served, and by which names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from adapters.http.edge_options import EdgeOptions
from adapters.http.wire.errors import model_not_found


def check_name(asked: str, options: EdgeOptions) -> str:
    """The name itself, if it is one of ours. Raises ApiError."""
    if asked not in options.names and not options.any_model:
        raise model_not_found(asked, options.names)
    return asked


def listed(options: EdgeOptions) -> dict[str, Any]:
    """As OpenAI, Anthropic and llama.cpp list models, all in one."""
    served = [described(name, options) for name in options.names]
    more = {"has_more": False, "first_id": served[0]["id"], "last_id": served[-1]["id"]}
    return {"object": "list", "data": served, "models": served, **more}


def described(name: str, options: EdgeOptions) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": options.created,
        "owned_by": "rekindle",
        "type": "model",
        "display_name": name,
        "root": options.model_id,
        "created_at": datetime.fromtimestamp(options.created, UTC).isoformat(),
        "context_length": options.max_ctx,
        "max_model_len": options.max_ctx,
        "meta": {"n_ctx": options.max_ctx, "n_vocab": options.vocab, **options.model_info},
    }
