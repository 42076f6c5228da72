"""Write items of the Responses API as text, for which chat templates have no form: shell calls, patches, summaries.

OpenAI's models know these tools by heart, and the model here does not. So in a conversation that began elsewhere, the
text says what was run, and its result.
"""

from __future__ import annotations

import base64
import binascii
import json
import shlex
from collections.abc import Mapping
from typing import Any

from adapters.http.wire.fields import Fields

DESCRIBED_CALLS = ("local_shell_call", "shell_call", "apply_patch_call")
DESCRIBED_OUTPUTS = ("local_shell_call_output", "shell_call_output", "apply_patch_call_output")
# Codex calls the item `compaction_summary` as well, and `context_compaction` where it made the summary itself.
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
TRIGGER = "compaction_trigger"  # the next item is a summary of all items before it
SEAL = "rekindle-summary-1\n"  # tells our summaries from those that other servers have encrypted
SUMMARY = "[summary of the conversation so far]\n"


def describe_call(item: Fields) -> str:
    """Return a call as a person would write it down."""
    match item.data:
        case {"type": "apply_patch_call", "operation": dict(operation)}:
            kind = read_text(operation, "type") or "patch"
            path = read_text(operation, "path")
            return "\n".join(filter(None, [f"[apply_patch call: {kind} {path}]", read_text(operation, "diff")]))
        case {"action": {"command": list(command)}}:
            return f"[shell call]\n{shlex.join(map(write_value, command))}"
        case {"action": {"commands": list(commands)}}:
            return "\n".join(["[shell call]", *map(write_value, commands)])
    return f"[{item.data['type']}]"


def describe_output(item: Fields) -> str:
    """Return the output of such a call."""
    kind = str(item.data["type"]).removesuffix("_call_output")
    output = item.data.get("output")
    chunks = output if isinstance(output, list) else []
    parts = [describe_chunk(chunk) for chunk in chunks]
    if output and not isinstance(output, list):
        parts = [write_value(output)]
    status = f", {read_text(item.data, 'status')}" if kind == "apply_patch" and read_text(item.data, "status") else ""
    return "\n".join([f"[output of the {kind.removeprefix('local_')} call{status}]", *filter(None, parts)])


def describe_chunk(chunk: Any) -> str:
    if not isinstance(chunk, Mapping):
        return write_value(chunk)
    outcome = chunk.get("outcome")
    outcome = outcome if isinstance(outcome, Mapping) else {}
    ended = f"[exit code {outcome['exit_code']}]" if isinstance(outcome.get("exit_code"), int) else ""
    ended = "[timed out]" if outcome.get("type") == "timeout" else ended
    return "\n".join(
        filter(None, [read_text(chunk, "stdout"), read_text(chunk, "stderr"), read_text(chunk, "text"), ended])
    )


def read_text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def write_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def seal_summary(text: str) -> str:
    """Return a summary in the form that clients keep unread and send back. It is encoded, not encrypted."""
    return base64.b64encode((SEAL + text).encode()).decode()


def open_summary(sealed: str) -> str | None:
    """Return the text of a summary that a Rekindle server made; None for any other."""
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(SEAL) if text.startswith(SEAL) else None
