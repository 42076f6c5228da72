"""The model that is served, and its names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from attrs import asdict

from adapters.http.edge_options import EdgeModel
from adapters.http.wire.errors import model_not_found


def check_name(name: str, model: EdgeModel) -> str:
    """Return the name, if it is one of the model's. Raises ApiError."""
    if name not in model.names and not model.any_model:
        raise model_not_found(name, model.names)
    return name


def list_models(model: EdgeModel) -> dict[str, Any]:
    """Return the list of models as OpenAI, Anthropic and llama.cpp have it, all in one object."""
    served = [describe_model(name, model) for name in model.names]
    more = {"has_more": False, "first_id": served[0]["id"], "last_id": served[-1]["id"]}
    return {"object": "list", "data": served, "models": served, **more}


def describe_model(name: str, model: EdgeModel) -> dict[str, Any]:
    details = {} if model.details is None else asdict(model.details)
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "rekindle",
        "type": "model",
        "display_name": name,
        "root": model.model_id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "context_length": model.max_ctx,
        "max_model_len": model.max_ctx,
        "meta": {"n_ctx": model.max_ctx, "n_vocab": model.vocab, **details},
    }
