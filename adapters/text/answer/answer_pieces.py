"""The pieces that a parser makes of an answer while it comes, and the blocks of a whole answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from attrs import evolve, frozen

from adapters.text.conversation import ToolCall


@frozen
class TextPiece:
    """More text of the answer. Never empty."""

    text: str


@frozen
class ReasoningPiece:
    """More of the reasoning. Never empty."""

    text: str


@frozen
class CallBegun:
    """A call begins. `index` counts the calls of an answer from 0. A call ends before the next one begins."""

    index: int
    id: str
    name: str


@frozen
class ArgumentsPiece:
    """More of a call's arguments, which are JSON as a whole. Never empty."""

    index: int
    text: str


@frozen
class CallEnded:
    """A call ends. Its arguments are cut off if the answer ended inside it, or continued as no call does."""

    index: int


AnswerPiece: TypeAlias = TextPiece | ReasoningPiece | CallBegun | ArgumentsPiece | CallEnded
# A whole answer consists of blocks. No two neighbouring blocks are both text or both reasoning.
AnswerBlock: TypeAlias = TextPiece | ReasoningPiece | ToolCall


def join_blocks(pieces: Iterable[AnswerPiece]) -> tuple[AnswerBlock, ...]:
    """Return the blocks of a whole answer, in order."""
    found: list[AnswerBlock] = []
    parts: list[str] = []  # the text of the last block

    def close() -> None:
        match found[-1] if parts else None:
            case ToolCall(id, name):
                found[-1] = ToolCall(id, name, "".join(parts))
            case TextPiece() | ReasoningPiece() as last:
                found[-1] = type(last)("".join(parts))
        parts.clear()

    for piece in pieces:
        match piece:
            case TextPiece(text) | ReasoningPiece(text):
                if not found or type(found[-1]) is not type(piece):
                    close()
                    found.append(piece)
                parts.append(text)
            case CallBegun():
                close()
                found.append(ToolCall(piece.id, piece.name, ""))
            case ArgumentsPiece():
                parts.append(piece.text)
    close()
    return tuple(found)


def merge_pieces(pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
    """Join each piece to the piece before it where they are of the same kind."""
    found: list[AnswerPiece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, TextPiece | ReasoningPiece | ArgumentsPiece) and type(last) is type(piece):
            found[-1] = evolve(last, text=last.text + piece.text)
        else:
            found.append(piece)
    return found


def join_text(pieces: Iterable[AnswerPiece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def join_reasoning(pieces: Iterable[AnswerPiece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))


def collect_calls(pieces: Iterable[AnswerPiece]) -> tuple[ToolCall, ...]:
    return tuple(block for block in join_blocks(pieces) if isinstance(block, ToolCall))
