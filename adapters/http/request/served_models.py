"""The model that is served, and its names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from adapters.http.edge_options import EdgeOptions
from adapters.http.wire.errors import model_not_found


def check_name(name: str, options: EdgeOptions) -> str:
    """Return the name, if it is one of the model's. Raises ApiError."""
    if name not in options.names and not options.any_model:
        raise model_not_found(name, options.names)
    return name


def list_models(options: EdgeOptions) -> dict[str, Any]:
    """Return the list of models as OpenAI, Anthropic and llama.cpp have it, all in one object."""
    served = [describe_model(name, options) for name in options.names]
    more = {"has_more": False, "first_id": served[0]["id"], "last_id": served[-1]["id"]}
    return {"object": "list", "data": served, "models": served, **more}


def describe_model(name: str, options: EdgeOptions) -> dict[str, Any]:
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
