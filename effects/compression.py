"""What may be left out of a prompt: who says what in it, how much of it is to stay, and what became of it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

from effects.ids import Span

Mode: TypeAlias = Literal["off", "auto", "always"]

WHOLE = 1000  # thousandths


@frozen
class PromptPart:
    """A message of a prompt: its tokens `[start, stop)`, from just past what opens it. protected: it stays as it is."""

    role: str
    start: int
    stop: int
    protected: bool = False


@frozen
class Compression:
    """What a request says of its prompt, checked and complete; the server has spoken where it did not."""

    mode: Mode = "off"
    threshold: int = 32_000  # prompt tokens still missing from which `auto` compresses
    keep: int = 50  # of the prompt, in thousandths
    parts: tuple[PromptPart, ...] = ()  # ascending; none where it is no conversation, or its mode is off
    continues: bool = False  # it has answers in it already
    tools: bool = False  # or functions that may be called

    def __attrs_post_init__(self) -> None:
        """Jobs also come out of traces, which are hostile input."""
        edges = [at for part in self.parts for at in (part.start, part.stop)]
        if not 1 <= self.keep <= WHOLE or self.threshold < 0 or edges != sorted(edges) or min(edges, default=0) < 0:
            raise ValueError(f"a compression that cannot be: {self}")


@frozen
class Compressed:
    """What became of a prompt of `original` tokens."""

    original: int
    why_not: str = ""  # machine-readable; empty where something was left out
    kept: tuple[Span, ...] = ()  # spans of the original that are served, where that is not all of it
    forced: tuple[Span, ...] = ()  # those of them that no score decided
    keep: int = 0  # thousandths that were to be kept
    ns: int = 0  # what the drafter took for it
