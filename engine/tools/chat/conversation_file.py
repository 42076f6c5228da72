"""A conversation: what was said, how it is kept in a file, and what a line that a person types means."""

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
    "save": "/save FILE   keep the conversation in FILE, as JSON",
    "load": "/load FILE   go on with one that was kept",
    "clear": "/clear       begin anew",
    "help": "/help        this",
}
KEYS = (
    '"""           begins and ends a prompt of several lines',
    "Ctrl-C        ends the answer",
    "Ctrl-D        leaves",
)
MARKS = '"""'
LARGEST = 64 << 20  # bytes of a file: a context of 2 million tokens takes less


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
    """system: said first, and again after a conversation is cleared."""

    system: str = ""
    messages: list[Message] = field(factory=list[Message])

    def add_question(self, prompt: str) -> list[dict[str, Any]]:
        """What the server is sent: everything so far, and the prompt."""
        system = [Message("system", self.system)] if self.system else []
        asked: list[dict[str, Any]] = msgspec.to_builtins([*system, *self.messages, Message("user", prompt)])
        return asked

    def add_answer(self, prompt: str, answer: str) -> None:
        """An answer that was cut short is one, too: it is what the person has read."""
        self.messages += [Message("user", prompt), Message("assistant", answer)]

    def clear(self) -> None:
        self.messages.clear()

    def save(self, path: Path) -> None:
        """Raises UserError for a file that is something else, OSError."""
        if path.exists():
            self._read(path, "not overwritten")
        system = [Message("system", self.system)] if self.system else []
        found = msgspec.to_builtins(SavedConversation([*system, *self.messages]))
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(path)

    def load(self, path: Path) -> None:
        """Raises UserError, OSError."""
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
    """None: it is to be answered. A path is no command. Raises UserError for what looks like one and is none."""
    word, _, rest = line.strip().partition(" ")
    if not re.fullmatch(r"/[a-z]+", word):
        return None
    for name in COMMANDS:
        if word == f"/{name}":
            break
    else:
        raise UserError(f"{word[:20]} is no command; accepted: {', '.join(f'/{name}' for name in COMMANDS)}")
    file = rest.strip()
    if bool(file) != (name in ("save", "load")):
        raise UserError(f"accepted: {COMMANDS[name].partition('   ')[0]}")
    return Command(name, file)


def read_prompt(line: Callable[[str], str]) -> str:
    """Read a prompt of one line, or of several between marks. line: reads one; takes what to show before it."""
    first = line(">>> ").strip()
    if not first.startswith(MARKS):
        return first
    lines = [first.removeprefix(MARKS)]
    while not lines[-1].rstrip().endswith(MARKS):
        lines.append(line("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(MARKS)
    return "\n".join(lines).strip()
