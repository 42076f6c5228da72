"""Describe the server itself: its health, and the properties that /props shows."""

from __future__ import annotations

from typing import Any

from attrs import asdict
from attrs.filters import exclude
from starlette.responses import JSONResponse

from adapters.http.edge_options import EdgeOptions
from adapters.http.request.sampling_fields import make_default_settings
from adapters.http.wire.errors import SHUTTING_DOWN, shard_lost
from adapters.text.model_text import Text
from effects.ports import Door, Status


def make_health(status: Status, retry_after_s: int) -> JSONResponse:
    """Return the answer of /health: 503 if nothing can be generated now."""
    troubles = dict(status.troubles)
    retry = {"retry-after": str(retry_after_s)}
    described = {"message": SHUTTING_DOWN, "type": "unavailable_error", "param": None, "code": 503}
    if status.state != "ready":
        return JSONResponse({"status": status.state, "error": described}, 503, retry)
    if status.outages:
        described["message"] = shard_lost(status.outages, "", retry_after_s).message
        return JSONResponse({"status": "unavailable", "troubles": troubles, "error": described}, 503, retry)
    # Answers are right in spite of any other trouble, so a balancer goes on sending requests.
    return JSONResponse({"status": "degraded", "troubles": troubles} if troubles else {"status": "ok"})


def collect_props(door: Door, text: Text, options: EdgeOptions) -> dict[str, Any]:
    """Return what /props shows."""
    status = door.status()
    template = text.template
    return {
        "default_generation_settings": make_default_settings(options),
        "model_alias": options.model.model_id,
        "chat_template": template.source if template is not None else None,
        "tool_parser": text.calls,
        "reasoning_parser": text.reasoning,
        "reasoning_efforts": dict(text.efforts),
        "bos_token": text.tokenizer.variables.get("bos_token", ""),
        "eos_token": text.tokenizer.variables.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False},
        "eos_tokens": list(text.tokenizer.end_tokens),
        "build_info": f"rekindle {options.model.version}",
        "numerics": {"mode": options.model.mode, **(options.model.numerics or {})},
        **status.props.build_json(),
        **asdict(status, filter=exclude("props")),
        **asdict(door.activity()),
    }
