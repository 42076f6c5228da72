"""The input of a custom tool that has a grammar, as a terminal or a part of a rule: bare, or inside a JSON string."""

from __future__ import annotations

from adapters.text.answer.rules.quoted_rules import quote_expression, quote_rules, to_terminal
from adapters.text.answer.rules.regular_rules import apply_flags, build_expression
from effects.grammar import Grammar


def bare_terminal(grammar: Grammar) -> str | None:
    """Return a terminal that matches the text itself; None where only rules can. Raises GrammarRefused."""
    found = build_expression(grammar.source, apply_flags) if grammar.kind == "lark" else grammar.source
    return None if found is None else to_terminal(found)


def bare_rules(grammar: Grammar) -> str:
    """Return a part of a rule that matches the text itself."""
    return f"%lark {{\n{grammar.source}\n}}"


def quoted_input(grammar: Grammar) -> str:
    """Return a part that matches the text between the quotation marks of a JSON string. Raises GrammarRefused."""
    if grammar.kind != "lark":
        return to_terminal(quote_expression(grammar.source))
    found = build_expression(grammar.source, quote_expression)
    return f"%lark {{\n{quote_rules(grammar.source)}\n}}" if found is None else to_terminal(found)
