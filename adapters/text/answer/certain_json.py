"""JSON that is passed on while it is being written, and that can be completed after every piece.

A writer holds back what is not certain yet: a comma, a key, and the brackets of a container whose first value has not
begun. Whatever it has passed on becomes valid JSON when the open string and the open brackets are closed. So a call
that breaks off anywhere still has arguments that a client can parse.

    written:   {"a": "x", "b": [tr
    passed on: {"a": "x"
    finish():  }
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

CLOSING = {"{": "}", "[": "]"}


@define(eq=False)
class JsonWriter:
    """Passes on JSON as soon as it is certain.

    emit: takes text that is certain.
    open_closers: the quotes and brackets that close what was passed on, innermost last.
    """

    emit: Callable[[str], None]
    open_closers: list[str] = field(factory=list, init=False)
    _held: list[str] = field(factory=list, init=False)
    _held_open: list[str] = field(factory=list, init=False)
    _comma: str | None = field(default=None, init=False)  # held back: a value or the end may follow it

    @property
    def depth(self) -> int:
        return len(self.open_closers) + len(self._held_open)

    @property
    def all_closers(self) -> list[str]:
        """The closers of all open containers, those that are held back included."""
        return [*self.open_closers, *self._held_open]

    def hold_text(self, text: str) -> None:
        """Hold back text that is right only if a value follows it."""
        self._take_comma()
        self._held.append(text)

    def hold_comma(self, text: str) -> None:
        """Hold back a comma with the white space around it. It is dropped if the container ends after it."""
        self._comma = text

    def open_container(self, bracket: str) -> None:
        self.hold_text(bracket)
        self._held_open.append(CLOSING[bracket])

    def close_container(self, space: str) -> None:
        """Close the innermost container. space: the white space before its closing bracket."""
        self._comma = None
        self._flush(space + self.all_closers[-1])
        self.open_closers.pop()

    def write_value(self, text: str) -> None:
        """Write a complete value that is no container, or more of a string."""
        self._flush(text)

    def begin_string(self) -> None:
        self._flush('"')
        self.open_closers.append('"')

    def end_string(self) -> None:
        self.open_closers.pop()
        self.emit('"')

    def finish(self) -> None:
        """Complete what was passed on, and drop what was held back."""
        self._held.clear()
        self._held_open.clear()
        self._comma = None
        if self.open_closers:
            closers = "".join(reversed(self.open_closers))
            self.open_closers.clear()
            self.emit(closers)

    def _take_comma(self) -> None:
        if self._comma is not None:
            self._held.append(self._comma)
            self._comma = None

    def _flush(self, text: str) -> None:
        self._take_comma()
        said = "".join(self._held) + text
        self._held.clear()
        self.open_closers += self._held_open
        self._held_open.clear()
        if said:
            self.emit(said)
