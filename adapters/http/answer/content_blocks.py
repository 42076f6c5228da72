"""Split an answer into blocks in a row, each of text, reasoning or one call. APIs whose streams open and close blocks
use it.
"""

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
    """One block of an answer.

    index: its position in the answer, from 0. call_id, name: of a call, whose text is its arguments.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@frozen
class BlockStart:
    block: Block


@frozen
class BlockDelta:
    block: Block
    text: str


@frozen
class BlockEnd:
    block: Block


BlockEvent: TypeAlias = BlockStart | BlockDelta | BlockEnd


@define(eq=False)
class BlockAssembler:
    """Makes blocks of the pieces of an answer. At most one block is open at a time."""

    finished_blocks: list[Block] = field(factory=list)
    open_block: Block | None = None

    def push(self, piece: AnswerPiece) -> Iterator[BlockEvent]:
        """Add a piece, and yield the events of blocks that it causes."""
        match piece:
            case TextPiece(text):
                yield from self._extend("text", text)
            case ReasoningPiece(text):
                yield from self._extend("reasoning", text)
            case CallBegun():
                yield from self.close_block()
                yield self._open(Block(len(self.finished_blocks), "call", piece.id, piece.name))
            case ArgumentsPiece():
                assert self.open_block is not None
                self.open_block.parts.append(piece.text)
                yield BlockDelta(self.open_block, piece.text)
            case CallEnded():
                yield from self.close_block()

    def close_block(self) -> Iterator[BlockEvent]:
        """End the open block, if there is one."""
        if self.open_block is not None:
            block = self.open_block
            self.open_block = None
            self.finished_blocks.append(block)
            yield BlockEnd(block)

    def _extend(self, kind: Literal["text", "reasoning"], text: str) -> Iterator[BlockEvent]:
        if self.open_block is None or self.open_block.kind != kind:
            yield from self.close_block()
            yield self._open(Block(len(self.finished_blocks), kind))
        assert self.open_block is not None
        self.open_block.parts.append(text)
        yield BlockDelta(self.open_block, text)

    def _open(self, block: Block) -> BlockStart:
        self.open_block = block
        return BlockStart(block)
