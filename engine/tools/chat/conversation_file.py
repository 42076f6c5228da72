"""A conversation: its messages, the file that keeps them, and the commands that a person can type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from attrs import define, field, frozen

from engine.settings.user_error import UserError

CommandName: TypeAlias = Literal["save", "load", "clear", "help"]
COMMANDS: dict[CommandName, str] = {
    "save": "/save FILE   save the conversation as JSON",
    "load": "/load FILE   continue a saved conversation",
    "clear": "/clear       begin anew",
    "help": "/help        this",
}
KEYS = (
    '"""           begins and ends a prompt of several lines',
    "Ctrl-C        ends the answer",
    "Ctrl-D        leaves",
)
MARKS = '"""'
# The most bytes of a file. A context of 2 million tokens takes less.
LARGEST = 64 << 20


@frozen
class Command:
    name: CommandName
    file: str = ""


class Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str


class SavedConversation(msgspec.Struct):
    messages: list[Message]


@define
class TypedConversation:
    """The messages so far. system: the first message, which stays when the conversation is cleared."""

    system: str = ""
    messages: list[Message] = field(factory=list[Message])

    def build_messages(self, prompt: str) -> list[dict[str, Any]]:
        """Return the messages to send: everything so far, and the prompt."""
        system = [Message("system", self.system)] if self.system else []
        asked: list[dict[str, Any]] = msgspec.to_builtins([*system, *self.messages, Message("user", prompt)])
        return asked

    def add_turn(self, prompt: str, answer: str) -> None:
        """Add a prompt and its answer. An answer that was cut short counts as well, because the person has read it."""
        self.messages += [Message("user", prompt), Message("assistant", answer)]

    def clear(self) -> None:
        self.messages.clear()

    def save(self, path: Path) -> None:
        """Write the conversation to a file. Raises OSError, and UserError if the file is something else."""
        if path.exists():
            self._read(path, "not overwritten")
        system = [Message("system", self.system)] if self.system else []
        found = msgspec.to_builtins(SavedConversation([*system, *self.messages]))
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(path)

    def load(self, path: Path) -> None:
        """Replace the conversation by that of a file. Raises UserError, OSError."""
        first, *others = read = self._read(path, "not loaded")
        self.system, self.messages = (first.content, others) if first.role == "system" else ("", read)

    @staticmethod
    def _read(path: Path, otherwise: str) -> list[Message]:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        try:
            found = msgspec.json.decode(data, type=SavedConversation).messages if len(data) <= LARGEST else []
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = []
        if not found:
            raise UserError(f'{path}: {otherwise}: no conversation, which is {{"messages": [...]}} of texts')
        return found


def parse_command(line: str) -> Command | None:
    """Return the command of a line, or None if it is a prompt.

    A path is no command. Raises UserError if it is unknown.
    """
    word, _, rest = line.strip().partition(" ")
    if not re.fullmatch(r"/[a-z]+", word):
        return None
    for name in COMMANDS:
        if word == f"/{name}":
            break
    else:
        raise UserError(f"{word[:20]} is not a command; accepted: {', '.join(f'/{name}' for name in COMMANDS)}")
    file = rest.strip()
    if bool(file) != (name in ("save", "load")):
        raise UserError(f"accepted: {COMMANDS[name].partition('   ')[0]}")
    return Command(name, file)


def read_prompt(line: Callable[[str], str]) -> str:
    """Read a prompt of one line, or of several lines between marks. line: reads a line after showing its argument."""
    first = line(">>> ").strip()
    if not first.startswith(MARKS):
        return first
    lines = [first.removeprefix(MARKS)]
    while not lines[-1].rstrip().endswith(MARKS):
        lines.append(line("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(MARKS)
    return "\n".join(lines).strip()
