"""Grammar rules of answers in the harmony format: reasoning first, then text, the requested form, or a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adapters.text.answer.forms.harmony_calls import CHANNEL, CONSTRAIN, FUNCTIONS, MESSAGE, START
from adapters.text.answer.rules.argument_grammar import ANY_TEXT, GeneratedRules, format_content, write_json_arguments
from adapters.text.conversation import FunctionTool
from adapters.text.template import ControlToken
from effects.grammar import Grammar

END = "<|end|>"


def build_harmony_grammar(
    tools: Sequence[FunctionTool], form: Grammar | None, controls: Mapping[str, ControlToken], *, must_call: bool
) -> Grammar:
    """Return the grammar of an answer that the template has begun with `<|start|>assistant`. Raises GrammarRefused.

    tools: the functions that may be called. form: what a final message must be; None: any text. An answer ends with
    its call, so there is at most one.
    """
    rules = GeneratedRules(controls)
    calls = [write_call(tool, rules) for tool in tools]
    text = format_content(form) if form is not None else "ANY"
    final = f"{rules.write_text(f'{CHANNEL}final{MESSAGE}')} {text}"
    said = rules.write_text(f"{CHANNEL}commentary{MESSAGE}")
    bodies = [*([] if must_call else [final]), *(f"preamble? {call}" for call in calls)]
    thought = rules.write_text(f"{CHANNEL}analysis{MESSAGE}")
    return Grammar(
        "lark",
        "\n".join(
            [
                "start: thought* body",
                f"thought: {thought} {write_message_end(rules)}",
                f"preamble: {said} {write_message_end(rules)}",
                "body: " + " | ".join(bodies),
                f"ANY: {ANY_TEXT}",
                *rules.lines,
            ]
        ),
    )


def write_call(tool: FunctionTool, rules: GeneratedRules) -> str:
    head = f"{CHANNEL}commentary to={FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}"
    return f"{rules.write_text(head)} {write_json_arguments(tool, rules)}"


def write_message_end(rules: GeneratedRules) -> str:
    """Return the rest of a message of any text, and the beginning of the next one."""
    following = rules.write_text(f"{START}assistant")
    if END in rules.controls:  # no text contains a control token
        return f"ANY {rules.write_text(END)} {following}"
    return f"{rules.add_suffix_rule(ANY_TEXT, END)} {following}"
