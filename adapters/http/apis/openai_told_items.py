"""Items of the Responses API that a chat template has no form for, told as text: shell calls, patches, summaries.

OpenAI's models know these tools by heart; the model here does not, so a conversation that began elsewhere tells it what
was run and what came of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import shlex
from collections.abc import Mapping
from typing import Any

from adapters.http.wire.fields import Fields

TOLD_CALLS = ("local_shell_call", "shell_call", "apply_patch_call")
TOLD_OUTPUTS = ("local_shell_call_output", "shell_call_output", "apply_patch_call_output")
# Codex calls the item `compaction_summary` as well, and `context_compaction` where it made the summary itself.
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
TRIGGER = "compaction_trigger"  # what follows it is a summary of all before it
SEAL = "rekindle-summary-1\n"  # tells our summaries from those that other servers have encrypted
SUMMARY = "[summary of the conversation so far]\n"


def told_call(item: Fields) -> str:
    """Return what was called, as a person would write it down."""
    match item.data:
        case {"type": "apply_patch_call", "operation": dict(operation)}:
            kind, path = word(operation, "type") or "patch", word(operation, "path")
            return "\n".join(filter(None, [f"[apply_patch call: {kind} {path}]", word(operation, "diff")]))
        case {"action": {"command": list(command)}}:
            return f"[shell call]\n{shlex.join(map(shown, command))}"
        case {"action": {"commands": list(commands)}}:
            return "\n".join(["[shell call]", *map(shown, commands)])
    return f"[{item.data['type']}]"


def told_output(item: Fields) -> str:
    """Return what came of such a call."""
    kind = str(item.data["type"]).removesuffix("_call_output")
    output = item.data.get("output")
    parts = [told_chunk(one) for one in output] if isinstance(output, list) else [shown(output)] if output else []
    status = f", {word(item.data, 'status')}" if kind == "apply_patch" and word(item.data, "status") else ""
    return "\n".join([f"[output of the {kind.removeprefix('local_')} call{status}]", *filter(None, parts)])


def told_chunk(chunk: Any) -> str:
    if not isinstance(chunk, Mapping):
        return shown(chunk)
    outcome = chunk.get("outcome")
    outcome = outcome if isinstance(outcome, Mapping) else {}
    ended = f"[exit code {outcome['exit_code']}]" if isinstance(outcome.get("exit_code"), int) else ""
    ended = "[timed out]" if outcome.get("type") == "timeout" else ended
    return "\n".join(filter(None, [word(chunk, "stdout"), word(chunk, "stderr"), word(chunk, "text"), ended]))


def word(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sealed_summary(text: str) -> str:
    """Return a summary as clients keep it: they send it back and do not look into it. It is encoded, not encrypted."""
    return base64.b64encode((SEAL + text).encode()).decode()


def opened_summary(sealed: str) -> str | None:
    """Return the text of a summary that a server of this kind made; None for any other."""
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(SEAL) if text.startswith(SEAL) else None
