"""An answer as blocks in a row, each of text, reasoning or one call, for APIs whose streams open and close them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from attrs import define, field, frozen

from adapters.text.answer.answer_pieces import (
    AnswerPiece,
    ArgumentsPiece,
    CallBegun,
    CallEnded,
    ReasoningPiece,
    TextPiece,
)


@define(eq=False)
class Block:
    """`place`: in the answer, from 0.  call, name: of a call; its text is its arguments."""

    place: int
    kind: Literal["text", "reasoning", "call"]
    call: str = ""
    name: str = ""
    parts: list[str] = field(factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@frozen
class BlockBegun:
    block: Block


@frozen
class BlockMore:
    block: Block
    text: str


@frozen
class BlockEnded:
    block: Block


BlockEvent: TypeAlias = BlockBegun | BlockMore | BlockEnded


@define(eq=False)
class Blocks:
    """One is open at a time, at most."""

    done: list[Block] = field(factory=list)
    open: Block | None = None

    def push(self, piece: AnswerPiece) -> Iterator[BlockEvent]:
        match piece:
            case TextPiece(text):
                yield from self._more("text", text)
            case ReasoningPiece(text):
                yield from self._more("reasoning", text)
            case CallBegun():
                yield from self.close()
                yield self._opened(Block(len(self.done), "call", piece.id, piece.name))
            case ArgumentsPiece():
                assert self.open is not None
                self.open.parts.append(piece.text)
                yield BlockMore(self.open, piece.text)
            case CallEnded():
                yield from self.close()

    def close(self) -> Iterator[BlockEvent]:
        """What is open, if anything is."""
        if self.open is not None:
            block, self.open = self.open, None
            self.done.append(block)
            yield BlockEnded(block)

    def _more(self, kind: Literal["text", "reasoning"], text: str) -> Iterator[BlockEvent]:
        if self.open is None or self.open.kind != kind:
            yield from self.close()
            yield self._opened(Block(len(self.done), kind))
        assert self.open is not None
        self.open.parts.append(text)
        yield BlockMore(self.open, text)

    def _opened(self, block: Block) -> BlockBegun:
        self.open = block
        return BlockBegun(block)
