"""The set-ups of the confined process. Its parent sends one as JSON, with its limits (`confined_process.py`)."""

from __future__ import annotations

from typing import TypedDict


class RendererSetup(TypedDict):
    """The set-up for rendering one template.

    controls: contents of control tokens; a mark has the index of one. variables: those of every render. nonce: of the
    marks. max_chars: of an output.
    """

    template: str
    controls: list[str]
    variables: dict[str, str]
    nonce: str
    max_chars: int


class ParserLimits(TypedDict):
    """The arguments of llguidance's `LLParserLimits`."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_items_in_row: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


class GrammarSetup(TypedDict):
    """The set-up for trying grammars.

    tokens: bytes of each token of the vocabulary, as hex digits. special: ids of control tokens. ends: ids of tokens
    that end an answer. layout: what `x-guidance` of a JSON schema says.
    """

    tokens: list[str]
    special: list[int]
    ends: list[int]
    limits: ParserLimits
    layout: dict[str, str]
