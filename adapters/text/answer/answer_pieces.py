"""What comes of an answer, piece by piece, and what it is as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from attrs import evolve, frozen

from adapters.text.conversation import ToolCall


@frozen
class TextPiece:
    """More of what the assistant says. Never empty."""

    text: str


@frozen
class ReasoningPiece:
    """More of what it thinks. Never empty."""

    text: str


@frozen
class CallBegun:
    """`place`: 0 for the first call of an answer, 1 for the second ... One ends before the next begins."""

    place: int
    id: str
    name: str


@frozen
class ArgumentsPiece:
    """More of a call's arguments, which are JSON as a whole. Never empty."""

    place: int
    text: str


@frozen
class CallEnded:
    """Also where the answer ended in the middle of it, or went on as no call does: then its arguments are cut off."""

    place: int


AnswerPiece: TypeAlias = TextPiece | ReasoningPiece | CallBegun | ArgumentsPiece | CallEnded
# A whole answer is pieces of text and reasoning, none of which could be joined to the one before it, and calls.
AnswerBlock: TypeAlias = TextPiece | ReasoningPiece | ToolCall


def blocks(pieces: Iterable[AnswerPiece]) -> tuple[AnswerBlock, ...]:
    """The whole answer, in its order."""
    found: list[AnswerBlock] = []
    parts: list[str] = []  # of the last one's text

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


def together(pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
    """The same, with what goes on joined to what it goes on from."""
    found: list[AnswerPiece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, TextPiece | ReasoningPiece | ArgumentsPiece) and type(last) is type(piece):
            found[-1] = evolve(last, text=last.text + piece.text)
        else:
            found.append(piece)
    return found


def text_of(pieces: Iterable[AnswerPiece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def reasoning_of(pieces: Iterable[AnswerPiece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))


def calls_of(pieces: Iterable[AnswerPiece]) -> tuple[ToolCall, ...]:
    return tuple(block for block in blocks(pieces) if isinstance(block, ToolCall))
