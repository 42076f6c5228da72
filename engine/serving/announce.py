"""The lines that a server prints and logs once it is ready."""

from __future__ import annotations

import json
import logging

from adapters.http.wire.server import RunningServer
from engine.loading.load_target import LoadedModel
from engine.loading.memory.expert_placement import describe_expert_placement
from engine.loading.shard_peers import describe_placement
from engine.settings.options import Options
from engine.settings.output.formatting import format_bytes

log = logging.getLogger("rekindle")
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def describe_costs(target: LoadedModel) -> str:
    """Return for the start line what weights, a token of context and a state take, and where experts are."""
    checkpoint = target.checkpoint
    shard = target.shard
    error = "" if checkpoint.rounding_error is None else f", error {checkpoint.rounding_error:.2%}"
    forms = "; ".join(checkpoint.packing_names[:3]) or str(shard.spec.dtype).removeprefix("torch.")
    state_bytes = sum(spec.nbytes for spec in shard.states.specs)
    host_bytes = shard.memory()["host"]
    kept = f", {checkpoint.compute_bits(target.weight_bytes):.1f} in memory" if checkpoint.packing_names else ""
    on_host = f", {format_bytes(host_bytes)} of it in host memory" if host_bytes else ""
    in_all = format_bytes(target.weight_bytes)
    line = f"  weights={forms} ({checkpoint.stored_bits:.1f} bits{kept}{error}, {in_all}{on_host})"
    line += describe_expert_placement(target.host_experts, shard)
    line += f"  context={format_bytes(shard.rows.spec.token_bytes)} a token"
    kv_dtype = target.details.kv_dtype
    line += "" if kv_dtype == target.details.dtype else f" in {kv_dtype}"
    draft_bytes = 0 if target.draft is None else target.draft.rows.spec.token_bytes
    line += f", draft {format_bytes(draft_bytes)}" if draft_bytes else ""
    return line + (f", {format_bytes(state_bytes)} a state" if state_bytes else "")


def announce(options: Options, target: LoadedModel, serving: RunningServer, seconds: float) -> None:
    """Print a line that a script can wait for, then a command that a person can paste."""
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    url = f"http://{host}:{serving.port}"
    if options.http.host not in LOOPBACK and not options.http.api_key:
        log.warning(
            "listening on %s without --api-key-file: everybody who can reach this address can use the server",
            options.http.host,
        )
    if "*" in options.http.allow_origin and not options.http.api_key:
        log.warning(
            "--allow-origin * without --api-key-file: any web page in a browser on this machine can use the server"
        )
    facts = f"model={target.model_id}  ctx={target.settings.max_context}  slots={target.settings.serving_slots}"
    facts += f"  layers={describe_placement(target.shard.parts)}"
    facts += describe_costs(target)
    drafted = "none" if target.draft is None else f"{target.settings.max_proposals} a decode step"
    copied = f"  copied={target.settings.max_copied} a decode step" if target.settings.max_copied else ""
    print(
        f"ready  {url}  {facts}  draft={drafted}{copied}  {target.numerics_line}  in {seconds:.1f} s",
        flush=True,
    )
    body = json.dumps({"messages": [{"role": "user", "content": "What is Rekindle?"}]})
    key = " -H 'Authorization: Bearer KEY'" if options.http.api_key else ""
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'", flush=True)
