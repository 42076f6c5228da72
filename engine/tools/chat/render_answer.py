"""Shows an answer as it comes: rendered Markdown on a terminal, plain text elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from attrs import define, field
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text as Line

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
LISTED = re.compile(r"([-*+]|\d{1,9}[.)])(\s|$)")
REFRESHES = 8  # updates a second; each renders the block that still grows


class View(Protocol):
    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, thought: str, text: str) -> None: ...


def split_settled(text: str) -> int:
    """Return how much of a Markdown text ends with a block that no later text can change."""
    fence = ""
    done = 0
    blank = 0
    at = 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(f" {fence[0]}\n"):
                fence = ""
        elif not line.strip():
            blank = at + len(line)
        else:
            if blank and not line[0].isspace() and not LISTED.match(line):
                done = blank
            blank = 0
            fence = mark[1] if mark else ""
        at += len(line)
    return done


@define(eq=False)
class RenderedView:
    """Shows an answer on a terminal. Complete blocks stay above; the last block is drawn again until it is complete."""

    console: Console
    _thought: str = ""
    _text: str = ""
    _live: Live = field(init=False)

    def __enter__(self) -> RenderedView:
        self._live = Live(
            console=self.console, get_renderable=self._render_growing, refresh_per_second=REFRESHES, transient=True
        )
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._print_above(len(self._text))

    def show(self, thought: str, text: str) -> None:
        self._thought += thought
        if text and self._thought:
            self._print_above(0)
        self._text += text
        if done := split_settled(self._text):
            self._print_above(done)

    def _render_growing(self) -> RenderableType:
        return Line(self._thought, style="dim italic") if self._thought else Markdown(self._text)

    def _print_above(self, stop: int) -> None:
        """Print the thoughts and the text up to `stop` above the part that still grows."""
        thought = self._thought.strip()
        text = self._text[:stop]
        self._thought = ""
        self._text = self._text[stop:]
        if thought:
            self.console.print(Line(f"{thought}\n", style="dim italic"))
        if text.strip():
            self.console.print(Markdown(text))
            if self._text:
                self.console.print()


@define(eq=False)
class PlainView:
    """Writes the answer and nothing else, for a pipe or a file."""

    console: Console
    _said: str = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        if self._said and not self._said.endswith("\n"):
            self._write("\n")

    def show(self, thought: str, text: str) -> None:  # noqa: ARG002 - what was thought is no answer
        if text:
            self._said = text
            self._write(text)

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


def choose_view(console: Console) -> View:
    return RenderedView(console) if console.is_terminal else PlainView(console)


@contextmanager
def without_echo(terminal: int) -> Iterator[None]:
    """Hide what is typed inside the block, and leave it for the next line. terminal: its descriptor."""
    try:
        import termios  # noqa: PLC0415 - not every system has it

        before = termios.tcgetattr(terminal)
    except (ImportError, termios.error):
        yield
        return
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
